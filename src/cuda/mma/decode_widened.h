// What decoding has to do more where keys and values are of 8 bits (S14). They become fp16 in
// registers, which holds them exactly, and so do queries, times a power of two of their row: bf16
// has more exponents than fp16, but hardly a row has. Neither they nor weights are rounded to 8
// bits. Scales by tensor or head wait until products are summed up; those by token are multiplied
// with scores and weights.
#pragma once

#include "cuda/mma/decode_walk.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::mma {

/// Weights of fp16 begin at 2^11, and are raised long before they end: so tails of 2^-35 are there.
inline constexpr int kWidenedOffset = 11;

template <core::Kernel K>
using DecodeWeights =
    Weights<core::dtype_of(K.operand), kTileKeys, core::widens(K) ? kWidenedOffset : 0>;

/// A power of two that takes numbers of up to `most` to less than 2^(top + 1), and one over it.
/// Numbers of up to `beside` stay finite.
struct PowerOfTwo {
  float factor = 1.0F, inverse = 1.0F;

  __device__ __forceinline__ static PowerOfTwo of(float most, int top, float beside = 0.0F) {
    constexpr int kBias = 127, kMost = 100;
    const int exponent = exponent_of(most);
    if (exponent == 0xFF || most == 0.0F) return {};
    const int power =
        core::min(core::min(top + kBias - exponent, kMost), 2 * kBias - exponent_of(beside));
    return {__uint_as_float(static_cast<std::uint32_t>(kBias + power) << 23),
            __uint_as_float(static_cast<std::uint32_t>(kBias - power) << 23)};
  }

 private:
  __device__ __forceinline__ static int exponent_of(float x) {
    return static_cast<int>(__float_as_uint(x) >> 23 & 0xFFU);
  }
};

/// Where columns 2 w and the next one, of 16, go: a lane's four neighbouring bytes of a key are
/// columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the product.
__device__ __forceinline__ constexpr int widened_word(int w) {
  return w / 8 * 8 + (w % 2 != 0 ? 4 : 0) + w % 8 / 2;
}

/// A warp makes fp16 of a row of queries of 16 bits, in the order of widened_word(); words: where
/// word i of the row is. Gives what the row's products must be multiplied by.
template <int kHeadDim, class Words>
__device__ __forceinline__ float widen_queries(Dtype dtype, const Words& words) {
  constexpr int kWords = kHeadDim / 64;  // of a lane
  static_assert(kHeadDim % 64 == 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[kWords][2], most = 0.0F;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const std::uint32_t word = *words(i * 32 + lane);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      x[i][j] = to_float(static_cast<std::uint16_t>(word >> 16 * j), dtype);
      most = fmaxf(most, fabsf(x[i][j]));
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0U, most, distance));
  }
  constexpr int kTop = 14;  // of fp16, whose last is 15
  const PowerOfTwo power = PowerOfTwo::of(most, kTop);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    *words(i * 32 + widened_word(lane)) =
        ptx::pack<Dtype::f16>(x[i][0] * power.factor, x[i][1] * power.factor);
  }
  return power.inverse;
}

/// What becomes of a tile's values: their scales by token, over a power of two that is at least the
/// greatest so far, so that weights times them are fp16 as well as weights.
class ValueScales {
 public:
  __device__ __forceinline__ void reset() { top_ = __uint_as_float(kLeast); }
  __device__ __forceinline__ float top() const { return top_; }

  /// scales: of the lane's four keys, which become what weights are multiplied by. rescale(factor):
  /// of outputs.
  template <class Rescale>
  __device__ __forceinline__ void take(float (&scales)[4], const Rescale& rescale) {
    float most =
        fmaxf(fmaxf(fabsf(scales[0]), fabsf(scales[1])), fmaxf(fabsf(scales[2]), fabsf(scales[3])));
    if (agreed(most > top_)) {
      most = fmaxf(most, __shfl_xor_sync(~0U, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0U, most, 2));
      const float before = top_;
      constexpr std::uint32_t kFraction = 0x7FFFFFU;
      top_ = __uint_as_float((__float_as_uint(most) + kFraction) & ~kFraction);
      rescale(before * inverse());
    }
#pragma unroll
    for (float& scale : scales) scale *= inverse();
  }

 private:
  static constexpr std::uint32_t kLeast = 27U << 23;  ///< 2^-100

  __device__ __forceinline__ float inverse() const {
    return __uint_as_float((254U << 23) - __float_as_uint(top_));
  }
  float top_ = 1.0F;
};

}  // namespace tessera::cuda::mma
