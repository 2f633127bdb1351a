// Several registers of a warp's lanes at once.
#pragma once

namespace tessera::cuda::ptx {

/// y[i]: what lane (mine ^ lanes) has as x[i]. All lanes of the warp come here together.
template <typename Word, int kCount>
__device__ __forceinline__ void exchange(const Word (&x)[kCount], int lanes, Word (&y)[kCount]) {
  static_assert(sizeof(Word) == sizeof(float));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float mine = __builtin_bit_cast(float, x[i]);
    y[i] = __builtin_bit_cast(Word, __shfl_xor_sync(~0U, mine, lanes));
  }
}

}  // namespace tessera::cuda::ptx
