// Tensors as kernels are told of them: addresses and strides.
#pragma once

#include "core/score.h"
#include "core/sequences.h"

namespace tessera::cuda {

/// A tensor by its address: for rows that take any layout, and those who read single rows.
struct Source {
  const void* data = nullptr;
  core::Strides strides;
};

/// A bias and ALiBi, as kernels are told of them.
struct Extras {
  const void* bias = nullptr;  ///< null: none
  core::BiasStrides bias_strides;
  const float* alibi_slopes = nullptr;  ///< null: no ALiBi
  std::int64_t alibi_batch = 0;         ///< stride, 0: broadcast
  Dtype bias_dtype = Dtype::f32;

  TESSERA_HD constexpr bool any() const { return bias != nullptr || alibi_slopes != nullptr; }
};

}  // namespace tessera::cuda
