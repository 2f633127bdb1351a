// The online softmax of a warp's accumulators where products are of i8 and weights go on in 16
// bits: as tile/softmax.h, which has the layout and the lazy reference, but products have scales.
//
// Products are integers, exact ones, and so are their values as fp32: those of 256 columns are less
// than 2^23.
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softmax.h"
#include "cuda/tile/softmax_parts.h"

namespace tessera::cuda {

/// kType: of the weights; kCapped: a softcap makes base-2 scores of s first, and no scale is left.
/// kFirst, kHeld, kKeys: see EightBitWeights.
template <Dtype kType, int kN, bool kCapped, int kFirst, int kHeld, int kKeys>
struct IntegerWeights {
  static constexpr int kScaledKeys = kKeys;

  float s[kN / 2];                ///< of a block: the bits of products, products, or base-2 scores
  std::uint32_t operand[kN / 4];  ///< the weights as the A operand of the next product
  std::uint32_t held[core::max(kHeld / 2, 1)];  ///< see EightBitWeights
  float reference[2];                           ///< of the rows, base 2
  float shift[2];                               ///< what is subtracted from the rows' scores
  float sum[2];                                 ///< of the rows' weights, this thread's
  float part[2];                                ///< the same of those that were made last
  float factor[2];                              ///< what O must be multiplied by after raise()
  float row_scale[2];  ///< what makes products scores, less the keys' scale
  float row_shift[2];  ///< capped: what is added to them then
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

  /// Scores become weights. kBits: of products that have not been converted; each is, where it is
  /// used, as all of them before the first exponential would hold those up. Otherwise as
  /// EightBitWeights::weigh().
  template <bool kBits, class Arrive, class Rescale>
  __device__ __forceinline__ void weigh(bool first, const Arrive& arrive, const Rescale& rescale) {
    shift[0] = reference[0];
    shift[1] = reference[1];
    weigh_parts<kN / 2, kFirst, (kHeld > 0), kBits>(*this, first, arrive, rescale);
  }
  /// The operand is complete. zero: see EightBitWeights.
  __device__ __forceinline__ void take(std::uint32_t zero) {
#pragma unroll
    for (int i = 0; i < kHeld / 2; ++i) operand[i] = held[i] ^ zero;
  }

  /// As EightBitWeights::cap().
  __device__ __forceinline__ void cap(float post) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float power = ptx::ex2(fmaf(s[i], scale_of(i), row_shift[i / 2 % 2]));
      s[i] = fmaf(-2.0F * post, ptx::rcp(1.0F + power), post);
    }
  }

  /// Weights, powers of 2, are made of scores kFrom to kTo. True: they are too large.
  template <int kFrom, int kTo, bool kBits>
  __device__ __forceinline__ bool make() {
    constexpr int kScores = core::min(kScaledKeys / 2, kTo - kFrom);  // with the same scales
    part[0] = part[1] = 0.0F;
#pragma unroll
    for (int first = kFrom; first < kTo; first += kScores) {
      const float scale[2] = {kCapped ? 1.0F : scale_of(first),
                              kCapped ? 1.0F : scale_of(first + 2)};
#pragma unroll
      for (int i = first; i < first + kScores; i += 2) {
        const int half = i / 2 % 2;
        float weight[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weight[j] = ptx::ex2(fmaf(at<kBits>(i + j), scale[half], -shift[half]));
          part[half] += weight[j];
        }
        word(i / 2) = ptx::pack<kType>(weight[0], weight[1]);
      }
    }
    return !(part[0] < kMostPart && part[1] < kMostPart);
  }
  __device__ __forceinline__ void keep() {
    sum[0] += part[0];
    sum[1] += part[1];
  }

  /// References become the rows' greatest scores from the kFrom-th on, where these are greater;
  /// what goes by them follows, but for O.
  template <int kFrom, bool kBits>
  __device__ __forceinline__ void raise() {
    // Not known to the compiler: it would look for the greatest score of every block.
    const float one = __uint_as_float(ptx::opaque(0x3F800000));
    float top[2] = {-core::kInfinity, -core::kInfinity};
#pragma unroll
    for (int i = kFrom; i < kN / 2; ++i) {
      const float score = at<kBits>(i) * (kCapped ? one : scale_of(i) * one);
      top[i / 2 % 2] = fmaxf(top[i / 2 % 2], score);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 2));
      const float raised = top[half] > reference[half]
                               ? raised_reference<(kFrom > 0)>(reference[half], top[half])
                               : reference[half];
      factor[half] = raised == -core::kInfinity ? 1.0F : ptx::ex2(reference[half] - raised);
      reference[half] = raised;
      shift[half] = core::shift_of(raised);
      sum[half] *= factor[half];
    }
#pragma unroll
    for (int i = 0; i < kFrom / 2; ++i) {
      // The factor alone may be less than fp16 has numbers for.
      const auto product = [&](int at) {
        return ptx::widen<kType>(static_cast<std::uint16_t>(word(i) >> at)) * factor[i % 2];
      };
      word(i) = ptx::pack<kType>(product(0), product(16));
    }
  }

 private:
  /// Word i of the weights.
  __device__ __forceinline__ std::uint32_t& word(int i) {
    return i < kHeld / 2 ? held[i] : operand[i];
  }
  /// What makes product i of s a score.
  __device__ __forceinline__ float scale_of(int i) const {
    return row_scale[i / 2 % 2] * key_scale[i / (kScaledKeys / 2)];
  }
  __device__ __forceinline__ float converted(int i) const { return ptx::widen_integer(s[i]); }
  template <bool kBits>
  __device__ __forceinline__ float at(int i) const {
    return kBits ? converted(i) : s[i];
  }
};

}  // namespace tessera::cuda
