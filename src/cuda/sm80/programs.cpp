#include "cuda/sm80/programs.h"

#include "cuda/mma/programs.h"

namespace tessera::cuda::sm80 {
namespace {

/// Machine code runs on devices of the same major and of equal or higher minor numbers. sm_86 and
/// sm_89 would have the instructions of sm_80, in another order. Not of 8.7: the driver of such a
/// machine is another. What has no machine code here has PTX: 8.7, 9.0 and what is newer.
constexpr Image kImages[] = {
    {"sm_80",
     [](int capability) { return capability >= 80 && capability < 90 && capability != 87; }},
    {"sm_120", [](int capability) { return capability >= 120 && capability < 130; }, 101376},
    {"compute_80", [](int capability) { return capability >= 80; }},
};

std::string target_on(int capability) { return "sm_" + std::to_string(capability); }

}  // namespace

const Architecture kArchitecture = mma::architecture_of_family(
    Arch::sm80, kImages, target_on, "tessera_sm80_auxiliary", "tessera_sm80_peak");

}  // namespace tessera::cuda::sm80
