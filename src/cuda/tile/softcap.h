// The softcap of a warp's accumulators: by tanh, or by a series that takes no special function,
// where one is good for all of them (core::SoftcapSeries).
#pragma once

#include "core/score.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda {

/// Which series is good for all scores of a warp, which are still raw products then: both where
/// `narrow` is. Neither: they lack only a factor.
struct Uncapped {
  bool narrow = false, wide = false;
};

/// tanh(x) = 1 - 2 / (e^2x + 1), right at both ends; x = pre * product.
__device__ __forceinline__ float capped_tanh(float pre, float product) {
  const float e = ptx::ex2(2.0F * core::kLog2e * pre * product);
  return 1.0F - 2.0F * ptx::rcp(e + 1.0F);
}

/// The greatest of the thread's scores in each of its two rows, or 0 if there is none above: floats
/// that are not negative have the order of their bits, and of three integers one instruction takes
/// the greatest.
template <int kCount>
__device__ __forceinline__ void greatest_or_zero(const float (&s)[kCount], float (&top)[2]) {
  int bits[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    int& x = bits[i / 2 % 2];
    x = __vimax3_s32(x, __float_as_int(s[i]), __float_as_int(s[i + 1]));
  }
  top[0] = __int_as_float(bits[0]);
  top[1] = __int_as_float(bits[1]);
}

/// Looks for the series that is good for all of the warp, and caps the scores at once if there is
/// none: tanh(pre x) / pre, which is no larger than x. The greatest scores come with it, from the
/// same bits.
template <int kCount>
__device__ __forceinline__ Uncapped cap(const core::Score& score, const core::SoftcapSeries& series,
                                        float (&s)[kCount], float (&top)[2]) {
  greatest_or_zero(s, top);
  // Of negative floats the least has the greatest bits. NaNs are beyond all limits.
  std::uint32_t low[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    std::uint32_t& x = low[i / 2 % 2];
    x = __vimax3_u32(x, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
  }
  const int least = static_cast<int>(core::max(low[0], low[1]) & 0x7FFFFFFF);
  const int farthest = __vimax3_s32(__float_as_int(top[0]), __float_as_int(top[1]), least);
  const bool narrow = !agreed(farthest > __float_as_int(series.narrow_limit));
  const bool wide = !agreed(farthest > __float_as_int(series.wide_limit));
  if (!wide) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = capped_tanh(score.pre, s[i]) * (1.0F / score.pre);
    greatest_or_zero(s, top);
  }
  return {narrow, wide};
}

}  // namespace tessera::cuda
