// What stands between a product and its score besides scale, softcap and mask: bias and ALiBi. For
// a warpgroup's accumulators (ptx/wgmma.h): in a thread's i-th, (i / 2 % 2) * 8 rows and
// i / 4 * 8 + i % 2 columns from its first one. Rows are queries and columns keys in the forward
// pass; in the backward pass rows are keys.
#pragma once

#include "core/score.h"
#include "cuda/sm90/fragment.h"

namespace tessera::cuda::sm90 {

/// A bias's elements for the accumulators.
struct BiasPlace {
  const void* bias;
  Dtype dtype;
  std::int64_t start;        ///< elements to the thread's first
  std::int64_t row, column;  ///< elements from one to the next
  int columns[2];  ///< how many exist from the first on, for either row; others count as 0
};

template <class T, int kCount>
__device__ __forceinline__ void add_bias_of(const BiasPlace& at, float (&s)[kCount]) {
  constexpr int kAtOnce = 4;  // pairs of columns whose loads are under way together
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T* from = static_cast<const T*>(at.bias) + at.start + 8 * half * at.row;
#pragma unroll
    for (int first = 0; first < kCount / 4; first += kAtOnce) {
      T x[kAtOnce][2];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c, from += 8 * at.column) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          x[c][j] = ptx::load_if(8 * (first + c) + j < at.columns[half], from + j * at.column);
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        float& score = s[4 * (first + i / 2) + 2 * half + i % 2];
        score = fmaf(to_float(x[i / 2][i % 2], at.dtype), core::kLog2e, score);
      }
    }
  }
}
/// Adds the bias to base-2 scores.
template <int kCount>
__device__ __forceinline__ void add_bias(const BiasPlace& at, float (&s)[kCount]) {
  if (at.dtype == Dtype::f32) {
    add_bias_of<float>(at, s);
  } else {
    add_bias_of<std::uint16_t>(at, s);
  }
}

/// Adds ALiBi's penalty (S6) to base-2 scores. distance: of the first accumulator's query from the
/// diagonal's at its key; kByRow: what it grows by from row to row, 1 or -1, and falls by from
/// column to column.
template <int kByRow, int kCount>
__device__ __forceinline__ void add_alibi(float slope, int distance, float (&s)[kCount]) {
  const auto first = static_cast<float>(distance);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto further = static_cast<float>(kByRow * (i / 2 % 2 * 8 - i / 4 * 8 - i % 2));
    s[i] += core::alibi2(slope, fabsf(first + further));
  }
}

}  // namespace tessera::cuda::sm90
