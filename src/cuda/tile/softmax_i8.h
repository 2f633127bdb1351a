// The online softmax of a warp's accumulators where products are of i8 and weights go on in 16
// bits: as tile/softmax.h, which has the layout and the lazy reference, but products have scales.
//
// Products are integers, exact ones, and so are their values as fp32: those of 256 columns are less
// than 2^23.
#pragma once

#include "core/scales.h"
#include "core/softmax.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda {

/// Of a block of kN keys, how many share a scale: each scale takes registers.
constexpr int integer_scaled_keys(int kN) {
  return kN % core::kIntegerScaleKeys == 0 ? core::kIntegerScaleKeys : kN % 64 == 0 ? 64 : 32;
}

/// kType: of the weights; kCapped: a softcap makes base-2 scores of s first, and no scale is left.
template <Dtype kType, int kN, bool kCapped>
struct IntegerWeights {
  static constexpr int kScaledKeys = integer_scaled_keys(kN);

  float s[kN / 2];                ///< of a block: the bits of products, products, or base-2 scores
  std::uint32_t operand[kN / 4];  ///< the weights as the A operand of the next product
  std::uint32_t made[kN / 4];     ///< what it becomes, made while the one before is multiplied
  float reference[2];             ///< of the rows, base 2
  float sum[2];                   ///< of the rows' weights, this thread's
  float factor[2];                ///< what O must be multiplied by after raise()
  float row_scale[2];             ///< what makes products scores, less the keys' scale
  float row_shift[2];             ///< capped: what is added to them then
  float key_scale[kN / kScaledKeys];

  __device__ __forceinline__ explicit IntegerWeights(float /*to_base2*/) {}

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = -core::kInfinity;
    sum[0] = sum[1] = 0.0F;
  }
  /// Products as fp32, which can be masked and capped.
  __device__ __forceinline__ void convert() {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] = converted(i);
  }

  /// Scores become weights, in `made`. kBits: of products that have not been converted; each is,
  /// where it is used, as all of them before the first exponential would hold those up.
  /// References are raised for a tile's first block, which has none, and if weights turn out too
  /// large; then all are made anew. True: O must be multiplied by `factor`.
  template <bool kBits, class Rescale>
  __device__ __forceinline__ bool weigh(bool first, const Rescale& rescale) {
    float shift[2] = {reference[0], reference[1]};
    // Not known to the compiler: it would have two copies of what follows.
    std::uint32_t raises = ptx::opaque(first ? 1 : 0);
#pragma unroll 1
    for (;;) {
      if (agreed(raises != 0)) {
        raise<kBits>();
        rescale();
#pragma unroll
        for (int half = 0; half < 2; ++half) shift[half] = core::shift_of(reference[half]);
      }
      float part[2];
      make_weights<kBits>(shift, part);
      if (!agreed(raises == 0 && !(part[0] < kMostPart && part[1] < kMostPart))) {
        sum[0] += part[0];
        sum[1] += part[1];
        return raises != 0;
      }
      raises = ptx::opaque(1);
    }
  }
  /// The operand has been multiplied: it becomes what was made. zero: see EightBitWeights.
  __device__ __forceinline__ void take(std::uint32_t zero) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) operand[i] = made[i] ^ zero;
  }

  /// As EightBitWeights::cap().
  __device__ __forceinline__ void cap(float post) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float power = ptx::ex2(fmaf(s[i], scale_of(i), row_shift[i / 2 % 2]));
      s[i] = fmaf(-2.0F * post, ptx::rcp(1.0F + power), post);
    }
  }

 private:
  /// What makes product i of s a score.
  __device__ __forceinline__ float scale_of(int i) const {
    return row_scale[i / 2 % 2] * key_scale[i / (kScaledKeys / 2)];
  }
  __device__ __forceinline__ float converted(int i) const { return ptx::widen_integer(s[i]); }
  template <bool kBits>
  __device__ __forceinline__ float at(int i) const {
    return kBits ? converted(i) : s[i];
  }

  /// Weights, powers of 2, are made; part: their sums.
  template <bool kBits>
  __device__ __forceinline__ void make_weights(const float (&shift)[2], float (&part)[2]) {
    constexpr int kScores = kScaledKeys / 2;  // of a thread, with the same scales
    part[0] = part[1] = 0.0F;
#pragma unroll
    for (int group = 0; group < kN / kScaledKeys; ++group) {
      const float scale[2] = {kCapped ? 1.0F : scale_of(group * kScores),
                              kCapped ? 1.0F : scale_of(group * kScores + 2)};
#pragma unroll
      for (int i = group * kScores; i < (group + 1) * kScores; i += 2) {
        const int half = i / 2 % 2;
        float weight[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weight[j] = ptx::ex2(fmaf(at<kBits>(i + j), scale[half], -shift[half]));
          part[half] += weight[j];
        }
        made[i / 2] = ptx::pack<kType>(weight[0], weight[1]);
      }
    }
  }

  /// References become the rows' greatest scores, where these are greater; what goes by them
  /// follows, but for O.
  template <bool kBits>
  __device__ __forceinline__ void raise() {
    // Not known to the compiler: it would look for the greatest score of every block.
    const float one = __uint_as_float(ptx::opaque(0x3F800000));
    float top[2] = {-core::kInfinity, -core::kInfinity};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float score = at<kBits>(i) * (kCapped ? one : scale_of(i) * one);
      top[i / 2 % 2] = fmaxf(top[i / 2 % 2], score);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 2));
      const float raised = fmaxf(top[half], reference[half]);
      factor[half] = raised == -core::kInfinity ? 1.0F : ptx::ex2(reference[half] - raised);
      reference[half] = raised;
      sum[half] *= factor[half];
    }
  }
};

}  // namespace tessera::cuda
