// Tensors as kernels are told of them: addresses and strides.
#pragma once

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
  std::int64_t bias_batch = 0, bias_head = 0, bias_query = 0,
               bias_key = 0;            ///< strides, 0: broadcast
  const float* alibi_slopes = nullptr;  ///< null: no ALiBi
  std::int64_t alibi_batch = 0;         ///< stride, 0: broadcast
  Dtype bias_dtype = Dtype::f32;
};

}  // namespace tessera::cuda
