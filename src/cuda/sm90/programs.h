// Hopper's kernels as programs for NVRTC.
#pragma once

#include "cuda/architecture.h"

namespace tessera::cuda::sm90 {

/// What the backward pass does before and after its main kernel (backward_rows.h), by its place
/// behind what every architecture has.
enum class BackwardKernel : std::uint8_t {
  prepare_bf16,
  finish_bf16,
  prepare_f16,
  finish_f16,
  sum_sinks,
  begin_bias,
  finish_bias,
};

inline constexpr Auxiliary kBackwardKernels[] = {
    {"prepare_rows_bf16", "sm90::prepare_rows<Dtype::bf16>", "sm90::BackwardRowParams"},
    {"finish_rows_bf16", "sm90::finish_rows<Dtype::bf16>", "sm90::BackwardRowParams"},
    {"prepare_rows_f16", "sm90::prepare_rows<Dtype::f16>", "sm90::BackwardRowParams"},
    {"finish_rows_f16", "sm90::finish_rows<Dtype::f16>", "sm90::BackwardRowParams"},
    {"sum_sinks", "sm90::sum_sinks", "sm90::BackwardRowParams"},
    {"begin_bias", "sm90::begin_bias", "sm90::BackwardBiasParams"},
    {"finish_bias", "sm90::finish_bias", "sm90::BackwardBiasParams"},
};

constexpr std::size_t number_of(BackwardKernel kernel) {
  return kAuxiliary.size() + static_cast<std::size_t>(kernel);
}

extern const Architecture kArchitecture;

}  // namespace tessera::cuda::sm90
