// Numbers on their way to elements of 8 bits on a GPU (S14): what quantising and appending have in
// common.
#pragma once

#include "core/quantize.h"
#include "cuda/ptx/exact.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/shuffle.h"

namespace tessera::cuda::aux {

using ptx::Exact;
using Written = core::WrittenScale<Exact>;

/// Four elements of a type of 8 bits.
__device__ __forceinline__ std::uint32_t narrow_four(Dtype dtype, Exact a, Exact b, Exact c,
                                                     Exact d) {
  if (dtype == Dtype::e4m3) {
#if __CUDA_ARCH__ >= 890
    return ptx::pack_e4m3(a.x, b.x, c.x, d.x);
#else
    return core::to_e4m3(a.x) | core::to_e4m3(b.x) << 8 | core::to_e4m3(c.x) << 16 |
           core::to_e4m3(d.x) << 24;
#endif
  }
  return core::to_i8(a.x) | core::to_i8(b.x) << 8 | core::to_i8(c.x) << 16 | core::to_i8(d.x) << 24;
}

/// The largest each of a warp's lanes, or of parts of so many.
template <int kCount>
__device__ __forceinline__ void largest(Exact (&x)[kCount], int lanes) {
  for (int i = 1; i < lanes; i *= 2) {
    Exact other[kCount];
    ptx::exchange(x, i, other);
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = ptx::larger_magnitude(x[j], other[j]);
  }
}
__device__ __forceinline__ Exact largest(Exact x, int lanes) {
  Exact one[1] = {x};
  largest(one, lanes);
  return one[0];
}

}  // namespace tessera::cuda::aux
