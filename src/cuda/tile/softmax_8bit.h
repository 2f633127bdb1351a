// The online softmax of a warp's accumulators where weights go on as e4m3: as tile/softmax.h, which
// has the layout and the lazy reference, but weights may not exceed what e4m3 holds. A row's
// greatest one is 2^6 where its reference was taken from, or up to twice that (softmax_parts.h),
// and the reference is raised before one exceeds 448.
//
// The sum of the weights is the product's: values have rows of ones behind them, so it is that of
// the weights as they were rounded, and constant values come back as they are.
#pragma once

#include "core/softmax.h"
#include "core/value_tiles.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softmax_parts.h"

namespace tessera::cuda {

/// log2 of the greatest weight of the block that a row's reference was taken from.
inline constexpr float kEightBitOffset = 6.0F;
/// A reference may lie so much above it, where what the mean of kSampled of a thread's scores, at
/// most kFarBelow the greatest, lies below it keeps weights from vanishing.
inline constexpr float kRoom = 2.0F, kFarBelow = 20.0F, kNearBelow = 11.0F;
inline constexpr int kSampled = 8;
/// log2 of the largest e4m3, 448, as the bits of an fp32. Positive numbers, infinity and NaN among
/// them, are in the order of their bits, and negative ones before them.
inline constexpr int kMostWeight = 0x410CEAED;

/// kCapped: a softcap makes base-2 scores of s first, and no scale is left. kFirst: of a thread's
/// kN / 2 scores those that are weighed first; kHeld: as many or none, whose weights are held until
/// the ones before have been multiplied. kKeys: of a block, that share a scale.
template <int kN, bool kCapped, int kFirst, int kHeld, int kKeys>
struct EightBitWeights {
  static constexpr int kScaledKeys = kKeys;

  float s[kN / 2];                ///< of a block: products, or base-2 scores
  std::uint32_t operand[kN / 8];  ///< the weights as the A operand of the next product
  std::uint32_t
      held[core::max(kHeld / 4, 1)];  ///< its beginning, while the one before is multiplied
  float reference[2];                 ///< of the rows, base 2
  float shift[2];                     ///< what is subtracted from the rows' scores
  float factor[2];                    ///< what O must be multiplied by after raise()
  float row_scale[2];                 ///< what makes products scores, less the keys' scale
  float row_shift[2];                 ///< capped: what is added to them then
  float key_scale[kN / kScaledKeys];

  __device__ __forceinline__ explicit EightBitWeights(float /*to_base2*/) {}

  __device__ __forceinline__ void reset() { reference[0] = reference[1] = -core::kInfinity; }

  /// Scores become weights. References are raised for a tile's first block, which has none, and if
  /// a weight turns out too large; then they are made anew. arrive, rescale: see weigh_parts().
  template <bool kBits, class Arrive, class Rescale>
  __device__ __forceinline__ void weigh(bool first, const Arrive& arrive, const Rescale& rescale) {
    shift[0] = reference[0] - kEightBitOffset;
    shift[1] = reference[1] - kEightBitOffset;
    weigh_parts<kN / 2, kFirst, (kHeld > 0), kBits>(*this, first, arrive, rescale);
  }
  /// The operand is complete. zero: one that the compiler does not know. It would leave a copy out,
  /// make weights in the registers that are being multiplied, and have the products wait for each
  /// other.
  __device__ __forceinline__ void take(std::uint32_t zero) {
#pragma unroll
    for (int i = 0; i < kHeld / 4; ++i) operand[i] = held[i] ^ zero;
  }

  /// s becomes tanh of the scores, times `post`: 1 - 2 / (1 + e^2x) errs by 2^-22, which is little
  /// beside what 8 bits do to a score. row_scale and row_shift have the factor 2 log2(e).
  __device__ __forceinline__ void cap(float post) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float power = ptx::ex2(fmaf(s[i], scale_of(i), row_shift[i / 2 % 2]));
      s[i] = fmaf(-2.0F * post, ptx::rcp(1.0F + power), post);
    }
  }

  /// Weights, powers of 2, are made of scores kFrom to kTo. True: one is too large. That is seen by
  /// exponents, which are there long before the powers.
  template <int kFrom, int kTo, bool /*kBits*/>
  __device__ __forceinline__ bool make() {
    int most = 0;
#pragma unroll
    for (int group = kFrom / 16; group < kTo / 16; ++group) {
      const float scale[2] = {kCapped ? 1.0F : scale_of(group * 16),
                              kCapped ? 1.0F : scale_of(group * 16 + 2)};
#pragma unroll
      for (int i = group * 16; i < group * 16 + 16; i += 8) {
        float weight[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int half = j / 2 % 2;
          const float power = fmaf(s[i + j], scale[half], -shift[half]);
          most = max(most, __float_as_int(power));
          weight[j] = ptx::ex2(power);
        }
        word(i / 4) = ptx::pack_e4m3(weight[0], weight[1], weight[4], weight[5]);
        word(i / 4 + 1) = ptx::pack_e4m3(weight[2], weight[3], weight[6], weight[7]);
      }
    }
    return most > kMostWeight;
  }
  __device__ __forceinline__ void keep() const {}

  /// References become the rows' greatest scores from the kFrom-th on, where these are greater; and
  /// where the mean of some scores lies so near that it stays a normal number, kRoom more: such
  /// rows have many weights alike, and a greater one is likely to come. Weights made so far follow.
  template <int kFrom, bool /*kBits*/>
  __device__ __forceinline__ void raise() {
    // Not known to the compiler: it would look for the greatest score of every block.
    const float one = __uint_as_float(ptx::opaque(0x3F800000));
    float top[2] = {-core::kInfinity, -core::kInfinity};
#pragma unroll
    for (int i = kFrom; i < kN / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], score(i, one));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 2));
      float below = 0.0F;
#pragma unroll
      for (int i = kFrom + 2 * half; i < kFrom + kSampled; i += 4) {
        below += fminf(top[half] - score(i, one), kFarBelow) +
                 fminf(top[half] - score(i + 1, one), kFarBelow);
      }
      below += __shfl_xor_sync(~0U, below, 1);
      below += __shfl_xor_sync(~0U, below, 2);
      const float room = below < 2 * kSampled * kNearBelow ? kRoom : 0.0F;
      const float raised = top[half] > reference[half]
                               ? raised_reference<(kFrom > 0)>(reference[half], top[half] + room)
                               : reference[half];
      factor[half] = raised == -core::kInfinity ? 1.0F : ptx::ex2(reference[half] - raised);
      reference[half] = raised;
      shift[half] = core::shift_of(raised) - kEightBitOffset;
    }
#pragma unroll
    for (int i = 0; i < kFrom / 4; ++i) word(i) = ptx::scale_e4m3(word(i), factor[i % 2]);
  }

 private:
  /// Word i of the weights.
  __device__ __forceinline__ std::uint32_t& word(int i) {
    return i < kHeld / 4 ? held[i] : operand[i];
  }
  /// What makes product i of s a score.
  __device__ __forceinline__ float scale_of(int i) const {
    return row_scale[i / 2 % 2] * key_scale[i / (kScaledKeys / 2)];
  }
  /// Score i, in base 2; one: 1.
  __device__ __forceinline__ float score(int i, float one) const {
    return s[i] * (kCapped ? one : scale_of(i) * one);
  }
};

}  // namespace tessera::cuda
