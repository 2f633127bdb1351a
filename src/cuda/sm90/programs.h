// Hopper's kernels as programs for NVRTC.
#pragma once

#include "cuda/architecture.h"

namespace tessera::cuda::sm90 {

/// What the backward pass does before and after its main kernel (backward_rows.h), by its place in
/// kAuxiliary.
enum class AuxiliaryKernel : std::uint8_t {
  prepare_bf16,
  finish_bf16,
  prepare_f16,
  finish_f16,
  sum_sinks,
  begin_bias,
  finish_bias,
};

inline constexpr Auxiliary kAuxiliary[] = {
    {"prepare_rows_bf16", "prepare_rows<Dtype::bf16>", "BackwardRowParams"},
    {"finish_rows_bf16", "finish_rows<Dtype::bf16>", "BackwardRowParams"},
    {"prepare_rows_f16", "prepare_rows<Dtype::f16>", "BackwardRowParams"},
    {"finish_rows_f16", "finish_rows<Dtype::f16>", "BackwardRowParams"},
    {"sum_sinks", "sum_sinks", "BackwardRowParams"},
    {"begin_bias", "begin_bias", "BackwardBiasParams"},
    {"finish_bias", "finish_bias", "BackwardBiasParams"},
};

extern const Architecture kArchitecture;

}  // namespace tessera::cuda::sm90
