#include "cuda/sm90/programs.h"

#include "cuda/mma/decode_program.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {
namespace {

/// The kernel of a row: forward<row>(p, shared), latent<row>(p, shared) where it decodes with qv,
/// backward<row>(p, shared) or, where its roles are split, backward_wide<row>(p, shared).
std::string row_program(const core::Kernel& row, const std::string& name) {
  if (row.form == core::Form::decode && !row.qv) return mma::decode_program(row, name);
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
         name + "(const __grid_constant__ cuda::" + params +
         " p) {\n"
         "  extern __shared__ char shared[];\n"
         "  cuda::sm90::" +
         kernel + "<kRow>(p, shared);\n}\n";
}

std::string auxiliary_program() {
  std::string text =
      "#include \"cuda/aux/append_quantizing.h\"\n"
      "#include \"cuda/aux/combine.h\"\n"
      "#include \"cuda/aux/find_prefixes.h\"\n"
      "#include \"cuda/aux/keep_pages.h\"\n"
      "#include \"cuda/aux/lay_values.h\"\n"
      "#include \"cuda/aux/quantize.h\"\n"
      "#include \"cuda/sm90/backward_rows.h\"\n"
      "static_assert(tessera::cuda::aux::kAppendThreads == tessera::cuda::sm90::kRowThreads);\n"
      "static_assert(tessera::cuda::aux::kCombineThreads == tessera::cuda::sm90::kRowThreads);\n"
      "static_assert(tessera::cuda::aux::kFindThreads == tessera::cuda::sm90::kRowThreads);\n"
      "static_assert(tessera::cuda::aux::kKeepThreads == tessera::cuda::sm90::kRowThreads);\n"
      "static_assert(tessera::cuda::aux::kLayThreads == tessera::cuda::sm90::kRowThreads);\n"
      "static_assert(tessera::cuda::aux::kQuantizeThreads == tessera::cuda::sm90::kRowThreads);\n"
      "using namespace tessera;\n"
      "using namespace tessera::cuda;\n"
      "using namespace tessera::cuda::sm90;\n";
  for (const Auxiliary& kernel : kAuxiliary) {
    // With room for 64 registers (8 blocks): left to itself, ptxas takes 56 and spills one.
    text += "extern \"C\" __global__ void __launch_bounds__(kRowThreads, " +
            std::to_string(kernel.resident) + ")\n" + kernel.name + "(const __grid_constant__ " +
            kernel.params + " p) { cuda::" + kernel.call + "(p); }\n";
  }
  return text;
}

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
    "  sm90::read_peak(memory, count, never);\n}\n",
    kPeakThreads,
    kPeakSharedBytes,
    2.0 * 4 * (2.0 * 64 * 256 * 16),  // two warpgroups, four wgmmas of 64 x 256 x 16
};

}  // namespace

const Architecture kArchitecture = {
    Arch::sm90,
    "-arch=sm_90a",
    [](const core::Kernel& row) { return threads(row); },
    [](const core::Kernel& row) { return shared_bytes(row); },
    row_program,
    kAuxiliary,
    "tessera_sm90_backward_rows",
    kRowThreads,
    auxiliary_program,
    kYardstick,
};

}  // namespace tessera::cuda::sm90
