// The online softmax of a warp's accumulators where products are of i8 and weights go on in 16 bits:
// as tile/softmax.h, which has the layout and the lazy reference, but products have scales.
//
// Products are integers. A conversion of each would take as long as its exponential, so their sums
// begin at the bits of 1.5 * 2^23 as fp32: a sum of up to 2^22 in magnitude, which is that of 256
// columns, makes these the bits of 1.5 * 2^23 + sum. What they are too large by goes into what is
// subtracted from scores, which errs by one unit of the products at most.
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softmax.h"
#include "cuda/tile/softmax_8bit.h"

namespace tessera::cuda {

inline constexpr float kIntegerZero = 12582912.0F;

/// kType: of the weights; kCapped: a softcap makes base-2 scores of s first, and no scale is left.
template <Dtype kType, int kN, bool kCapped>
struct IntegerWeights {
  float s[kN / 2];                ///< of a block: products, or base-2 scores
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
  /// Before products are added to it.
  __device__ __forceinline__ void clear_products() {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s[i] = kIntegerZero;
  }

  /// Scores become weights, in `made`. References are raised for a tile's first block, which has
  /// none, and if weights turn out too large; then all are made anew. True: O must be multiplied by
  /// `factor`.
  template <class Rescale>
  __device__ __forceinline__ bool weigh(bool first, const Rescale& rescale) {
    float shift[2] = {reference[0], reference[1]};
    // Not known to the compiler: it would have two copies of what follows.
    std::uint32_t raises = ptx::opaque(first ? 1 : 0);
#pragma unroll 1
    for (;;) {
      if (agreed(raises != 0)) {
        raise();
        rescale();
#pragma unroll
        for (int half = 0; half < 2; ++half) shift[half] = core::shift_of(reference[half]);
      }
      float part[2];
      make_weights(shift, part);
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
      const float power = ptx::ex2(fmaf(s[i], scale_of(i), offset_of(i, row_shift[i / 2 % 2])));
      s[i] = fmaf(-2.0F * post, ptx::rcp(1.0F + power), post);
    }
  }

 private:
  /// What makes product i of s a score.
  __device__ __forceinline__ float scale_of(int i) const {
    return row_scale[i / 2 % 2] * key_scale[i / (kScaledKeys / 2)];
  }
  /// What is added to it, besides `more`, as s is too large.
  __device__ __forceinline__ float offset_of(int i, float more) const {
    return fmaf(-kIntegerZero, scale_of(i), more);
  }

  /// Weights, powers of 2, are made; part: their sums.
  __device__ __forceinline__ void make_weights(const float (&shift)[2], float (&part)[2]) {
    part[0] = part[1] = 0.0F;
#pragma unroll
    for (int group = 0; group < kN / kScaledKeys; ++group) {
      float scale[2], offset[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = group * 16 + 2 * half;
        scale[half] = kCapped ? 1.0F : scale_of(i);
        offset[half] = kCapped ? -shift[half] : offset_of(i, -shift[half]);
      }
#pragma unroll
      for (int i = group * 16; i < group * 16 + 16; i += 2) {
        const int half = i / 2 % 2;
        float weight[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weight[j] = ptx::ex2(fmaf(s[i + j], scale[half], offset[half]));
          part[half] += weight[j];
        }
        made[i / 2] = ptx::pack<kType>(weight[0], weight[1]);
      }
    }
  }

  /// References become the rows' greatest scores, where these are greater; what goes by them
  /// follows, but for O.
  __device__ __forceinline__ void raise() {
    // Not known to the compiler: it would look for the greatest score of every block.
    const float zero = __uint_as_float(ptx::opaque(0));
    float top[2] = {-core::kInfinity, -core::kInfinity};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float score = kCapped ? s[i] + zero : fmaf(s[i], scale_of(i), offset_of(i, zero));
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
