#include "cuda/auxiliary.h"

namespace tessera::cuda {

std::string auxiliary_program(std::span<const Auxiliary> kernels, const std::string& includes) {
  std::string text =
      "#include \"cuda/aux/append_quantizing.h\"\n"
      "#include \"cuda/aux/backward_rows.h\"\n"
      "#include \"cuda/aux/combine.h\"\n"
      "#include \"cuda/aux/find_prefixes.h\"\n"
      "#include \"cuda/aux/keep_pages.h\"\n"
      "#include \"cuda/aux/lay_values.h\"\n"
      "#include \"cuda/aux/quantize.h\"\n" +
      includes +
      "using namespace tessera;\n"
      "using namespace tessera::cuda;\n"
      "constexpr int kThreads = " +
      std::to_string(kAuxiliaryThreads) + ";\n";
  for (const char* const threads :
       {"aux::kAppendThreads", "aux::kCombineThreads", "aux::kFindThreads", "aux::kKeepThreads",
        "aux::kLayThreads", "aux::kQuantizeThreads", "aux::kRowThreads"}) {
    text += std::string("static_assert(") + threads + " == kThreads);\n";
  }
  // For Turing the same code takes a few registers more.
  text +=
      "constexpr int resident(int blocks) {\n"
      "  return __CUDA_ARCH__ < 800 && blocks == 5 ? 4 : blocks;\n"
      "}\n";
  for (const Auxiliary& kernel : kernels) {
    // With room for 64 registers (8 blocks): left to itself, ptxas takes 56 and spills one.
    text += "extern \"C\" __global__ void __launch_bounds__(kThreads, resident(" +
            std::to_string(kernel.resident) + "))\n" + kernel.name + "(const __grid_constant__ " +
            kernel.params + " p) { cuda::" + kernel.call + "(p); }\n";
  }
  return text;
}

}  // namespace tessera::cuda
