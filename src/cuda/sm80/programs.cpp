#include "cuda/sm80/programs.h"

#include "core/mma_shape.h"
#include "cuda/mma/backward_program.h"
#include "cuda/mma/decode_program.h"
#include "cuda/mma/forward_program.h"
#include "cuda/sm80/peak_shape.h"

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

/// A row's kernel.
std::string row_program(const core::Kernel& row, const std::string& name) {
  if (row.pass == Pass::backward) return mma::backward_program(row, name);
  return row.form == core::Form::decode ? mma::decode_program(row, name)
                                        : mma::forward_program(row, name);
}

constexpr auto kAll = with_finish("mma::finish_rows<Dtype::bf16>", "mma::finish_rows<Dtype::f16>");

constexpr int kPeakWarps = kPeakThreads / 32;
constexpr double kPeakOperations = 2.0 * 16 * 8 * 16 * kPeakProducts * kPeakWarps;

constexpr Yardstick kYardstick = {
    "tessera_sm80_peak",
    "#include \"cuda/sm80/peak.h\"\n"
    "#include \"cuda/tile/read_peak.h\"\n"
    "using namespace tessera::cuda;\n"
    "extern \"C\" __global__ void __launch_bounds__(sm80::kPeakThreads, 1)\n"
    "multiply_peak(int rounds, float* never) {\n"
    "  sm80::multiply_peak(rounds, never);\n}\n"
    "extern \"C\" __global__ void __launch_bounds__(sm80::kPeakThreads)\n"
    "read_peak(const uint4* memory, std::int64_t count, float* never) {\n"
    "  read_peak<sm80::kPeakThreads>(memory, count, never);\n}\n",
    kPeakThreads,
    0,
    kPeakOperations,
};

}  // namespace

const Architecture kArchitecture = {
    .arch = Arch::sm80,
    .images = kImages,
    .target_on = [](int capability) { return "sm_" + std::to_string(capability); },
    .begins_early = false,
    .threads =
        [](const core::Kernel& row) {
          return row.form == core::Form::decode ? core::decode_threads(row)
                                                : core::mma_threads(row);
        },
    .shared_bytes = [](const core::Kernel& row) { return core::mma_bytes(row); },
    .row_program = row_program,
    .auxiliary = kAll,
    .auxiliary_symbol = "tessera_sm80_auxiliary",
    .auxiliary_includes = "#include \"cuda/mma/backward_finish.h\"\n",
    .yardstick = kYardstick,
};

}  // namespace tessera::cuda::sm80
