#include "cuda/sm90/programs.h"

#include "cuda/mma/programs.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {
namespace {

/// The kernel of a row: forward<row>(p, shared), latent<row>(p, shared) where it decodes with qv,
/// backward<row>(p, shared) or, where its roles are split, backward_wide<row>(p, shared).
std::string row_program(const core::Kernel& row, const std::string& name) {
  if (row.stages > 0) return mma::row_program(row, name);
  const bool forward = row.pass == Pass::forward;
  const std::string kernel = row.qv              ? "latent"
                             : forward           ? "forward"
                             : splits_roles(row) ? "backward_wide"
                                                 : "backward";
  const std::string params = row.qv    ? "mma::DecodeParams"
                             : forward ? "sm90::ForwardParams"
                                       : "sm90::BackwardParams";
  return "#include \"cuda/sm90/" + kernel +
         ".h\"\n"
         "using namespace tessera;\n"
         "constexpr core::Kernel kRow = " +
         value_text(row) +
         ";\n"
         "extern \"C\" __global__ void __launch_bounds__(cuda::sm90::threads(kRow), 1)\n" +
         (row.cluster > 1 ? "__cluster_dims__(kRow.cluster, 1, 1)\n" : "") + name +
         "(const __grid_constant__ cuda::" + params +
         " p) {\n"
         "  extern __shared__ " +
         (rounds_promoted(row) ? "__align__(1024) " : "") +
         "char shared[];\n"
         "  cuda::sm90::" +
         kernel + "<kRow>(p, shared);\n}\n";
}

constexpr auto kAll =
    with_finish({"sm90::finish_rows<Dtype::bf16>", "sm90::finish_rows<Dtype::f16>",
                 "mma::finish_rows<Dtype::bf16>", "mma::finish_rows<Dtype::f16>",
                 "sm90::finish_keys<Dtype::bf16>", "sm90::finish_keys<Dtype::f16>"});

/// Code that uses what only 9.0 has runs there and nowhere else.
constexpr Image kImages[] = {{"sm_90a", [](int capability) { return capability == 90; }}};

constexpr Yardstick kYardstick = {
    "tessera_sm90_peak",
    "#include \"cuda/sm90/peak.h\"\n"
    "using namespace tessera::cuda;\n"
    "extern \"C\" __global__ void __launch_bounds__(sm90::kPeakThreads, 1)\n"
    "multiply_peak(int rounds, float* never) {\n"
    "  extern __shared__ char shared[];\n"
    "  sm90::multiply_peak(shared, rounds, never);\n}\n"
    "extern \"C\" __global__ void __launch_bounds__(sm90::kPeakThreads)\n"
    "read_peak(const uint4* memory, std::int64_t count, float* never) {\n"
    "  read_peak<sm90::kPeakThreads>(memory, count, never);\n}\n",
    kPeakThreads,
    kPeakSharedBytes,
    2.0 * 4 * (2.0 * 64 * 256 * 16),  // two warpgroups, four wgmmas of 64 x 256 x 16
};

}  // namespace

const Architecture kArchitecture = {
    .arch = Arch::sm90,
    .images = kImages,
    .target_on = [](int) -> std::string { return "sm_90a"; },
    .begins_early = true,
    .threads = [](const core::Kernel& row) { return threads(row); },
    .shared_bytes = [](const core::Kernel& row) { return shared_bytes(row); },
    .row_program = row_program,
    .auxiliary = kAll,
    .auxiliary_symbol = "tessera_sm90_auxiliary",
    .auxiliary_includes =
        "#include \"cuda/mma/backward_finish.h\"\n"
        "#include \"cuda/sm90/piece.h\"\n",
    .yardstick = kYardstick,
};

}  // namespace tessera::cuda::sm90
