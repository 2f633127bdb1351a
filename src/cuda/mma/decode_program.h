// The decoding kernel as a program for NVRTC.
#pragma once

#include <string>

#include "core/kernel.h"
#include "cuda/architecture.h"

namespace tessera::cuda::mma {

inline std::string decode_program(const core::Kernel& row, const std::string& name) {
  return "#include \"cuda/mma/decode.h\"\n"
         "using namespace tessera;\n"
         "constexpr core::Kernel kRow = " +
         value_text(row) +
         ";\n"
         "extern \"C\" __global__ void __launch_bounds__(core::decode_threads(kRow), "
         "kRow.blocks)\n" +
         name +
         "(const __grid_constant__ cuda::mma::DecodeParams p) {\n"
         "  extern __shared__ char shared[];\n"
         "  cuda::mma::decode<kRow>(p, shared);\n}\n";
}

}  // namespace tessera::cuda::mma
