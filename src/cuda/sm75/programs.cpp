#include "cuda/sm75/programs.h"

#include "cuda/mma/programs.h"

namespace tessera::cuda::sm75 {
namespace {

/// PTX is for drivers that are older than the machine code; and newer devices run it, too, where
/// they are to run what Turing runs.
constexpr Image kImages[] = {
    {"sm_75", [](int capability) { return capability == 75; }},
    {"compute_75", [](int capability) { return capability >= 75; }},
};

std::string target_on(int capability) { return capability == 75 ? "sm_75" : "compute_75"; }

}  // namespace

const Architecture kArchitecture = mma::architecture_of_family(
    Arch::sm75, kImages, target_on, "tessera_sm75_auxiliary", "tessera_sm75_peak");

}  // namespace tessera::cuda::sm75
