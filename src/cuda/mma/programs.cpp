#include "cuda/mma/programs.h"

#include "cuda/architecture.h"

namespace tessera::cuda::mma {

std::string row_program(const core::Kernel& row, const std::string& name) {
  const bool decodes = row.form == core::Form::decode;
  const std::string kernel = row.pass == Pass::backward ? "backward"
                             : decodes                  ? "decode"
                                                        : "forward";
  const std::string params = row.pass == Pass::backward ? "BackwardParams"
                             : decodes                  ? "DecodeParams"
                                                        : "ForwardParams";
  const std::string threads = decodes ? "decode_threads" : "mma_threads";
  return "#include \"cuda/mma/" + kernel +
         ".h\"\n"
         "using namespace tessera;\n"
         "constexpr core::Kernel kRow = " +
         value_text(row) +
         ";\n"
         "extern \"C\" __global__ void __launch_bounds__(core::" +
         threads + "(kRow), kRow.blocks)\n" + name +
         "(const __grid_constant__ cuda::mma::" + params +
         " p) {\n"
         "  extern __shared__ char shared[];\n"
         "  cuda::mma::" +
         kernel + "<kRow>(p, shared);\n}\n";
}

}  // namespace tessera::cuda::mma
