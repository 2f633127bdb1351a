// The backward by mma.sync as a program for NVRTC.
#pragma once

#include <string>

#include "core/kernel.h"
#include "cuda/architecture.h"

namespace tessera::cuda::mma {

inline std::string backward_program(const core::Kernel& row, const std::string& name) {
  return "#include \"cuda/mma/backward.h\"\n"
         "using namespace tessera;\n"
         "constexpr core::Kernel kRow = " +
         value_text(row) +
         ";\n"
         "extern \"C\" __global__ void __launch_bounds__(core::mma_threads(kRow), kRow.blocks)\n" +
         name +
         "(const __grid_constant__ cuda::mma::BackwardParams p) {\n"
         "  extern __shared__ char shared[];\n"
         "  cuda::mma::backward<kRow>(p, shared);\n}\n";
}

}  // namespace tessera::cuda::mma
