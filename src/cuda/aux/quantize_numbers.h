// Numbers of a row that a thread has on their way to elements (quantize_rows.h, quantize_plain.h):
// columns [first, first + kPiece), and as many half of the lanes' columns behind them.
#pragma once

#include "cuda/aux/quantize_pieces.h"

namespace tessera::cuda::aux {

using Numbers = Exact[kThreadColumns];

__device__ __forceinline__ Exact most_of(Exact most, const Numbers& x) {
#pragma unroll
  for (int i = 0; i < kThreadColumns; ++i) most = ptx::larger_magnitude(most, x[i]);
  return most;
}

__device__ __forceinline__ void butterflies(Numbers& x, int stride) {
#pragma unroll
  for (int i = 0; i < kThreadColumns; ++i) {
    if ((i & stride) != 0) continue;
    const Exact a = x[i], b = x[i + stride];
    x[i] = a + b;
    x[i + stride] = a - b;
  }
}

/// A Hadamard transform of every n columns, stages of stride 1, 2, 4 and so on: the first four and
/// the last are the thread's own, those between are exchanges of a row's lanes. All lanes of the
/// warp come here together.
__device__ __forceinline__ void transform(Numbers& x, int n, int lanes, int first) {
  const int apart = lanes * kPiece;
#pragma unroll
  for (int stride = 1; stride < kPiece; stride *= 2) {
    if (stride < n) butterflies(x, stride);
  }
  for (int stride = kPiece; stride < n && stride < apart; stride *= 2) {
    Numbers other;
    ptx::exchange(x, stride / kPiece, other);
    // a + b and a - b: the second lane's own number is b.
    const Exact sign((first & stride) != 0 ? -1.0F : 1.0F);
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) x[i] = fused(x[i], sign, other[i]);
  }
  if (n > apart) butterflies(x, kPiece);
  const Exact factor(core::hadamard_factor(n));
#pragma unroll
  for (int i = 0; i < kThreadColumns; ++i) x[i] = x[i] * factor;
}

}  // namespace tessera::cuda::aux
