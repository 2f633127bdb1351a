// Rows by mma.sync as programs for NVRTC, and what is alike of architectures whose rows all are.
#pragma once

#include <span>
#include <string>

#include "core/mma_shape.h"
#include "cuda/architecture.h"
#include "cuda/mma/peak_shape.h"

namespace tessera::cuda::mma {

/// CUDA C++ of a row's kernel, a function of that name.
std::string row_program(const core::Kernel& row, const std::string& name);

inline constexpr auto kAuxiliaryOfFamily =
    with_finish({"mma::finish_rows<Dtype::bf16>", "mma::finish_rows<Dtype::f16>"});

/// Symbols: of the programs besides rows.
constexpr Architecture architecture_of_family(Arch arch, std::span<const Image> images,
                                              std::string (*target_on)(int capability),
                                              const char* auxiliary_symbol,
                                              const char* yardstick_symbol) {
  return {
      .arch = arch,
      .images = images,
      .target_on = target_on,
      .begins_early = false,
      .threads =
          [](const core::Kernel& row) {
            return row.form == core::Form::decode ? core::decode_threads(row)
                                                  : core::mma_threads(row);
          },
      .shared_bytes = [](const core::Kernel& row) { return core::mma_bytes(row); },
      .row_program = row_program,
      .auxiliary = kAuxiliaryOfFamily,
      .auxiliary_symbol = auxiliary_symbol,
      .auxiliary_includes = "#include \"cuda/mma/backward_finish.h\"\n",
      .yardstick =
          {
              yardstick_symbol,
              "#include \"cuda/mma/peak.h\"\n"
              "#include \"cuda/tile/read_peak.h\"\n"
              "using namespace tessera::cuda;\n"
              "extern \"C\" __global__ void __launch_bounds__(mma::kPeakThreads, 1)\n"
              "multiply_peak(int rounds, float* never) {\n"
              "  mma::multiply_peak(rounds, never);\n}\n"
              "extern \"C\" __global__ void __launch_bounds__(mma::kPeakThreads)\n"
              "read_peak(const uint4* memory, std::int64_t count, float* never) {\n"
              "  read_peak<mma::kPeakThreads>(memory, count, never);\n}\n",
              kPeakThreads,
              0,
              kPeakOperations,
          },
  };
}

}  // namespace tessera::cuda::mma
