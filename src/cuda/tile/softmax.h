// The online softmax of a warp's accumulators: scores of a block of keys become weights in
// registers, and the rows' state follows. A thread has two rows, element i of row i / 2 % 2; a
// row's four threads are neighbours (ptx/wgmma.h has the layout, which is mma.sync's, too).
//
// What is subtracted from a row's scores is a reference, the greatest score of the first block with
// one. It is raised only when weights turn out much larger than 1, so O is hardly ever rescaled
// (FlashAttention-4's lazy rescaling), and later blocks are weighed without a look for their
// maximum.
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softcap.h"

namespace tessera::cuda {

/// What a thread's weights of a block and row may add up to before the reference is raised; 16-bit
/// weights are as precise there as below 1.
inline constexpr float kMostPart = 4096.0F;
/// Where maxima are looked for.
inline constexpr float kSlack = core::kGpuSlack;

/// kOffset: weights begin at 2^kOffset, for a type that ends soon below 1.
template <Dtype kType, int kN, int kOffset = 0>
struct Weights {
  /// What a thread's weights of a block and row add up to at most.
  static constexpr float kMost = kOffset == 0 ? kMostPart : 0x1p15F;

  float to_base2 = 1.0F;          ///< what scores lack as they lie in s, where no series made them
  float s[kN / 2];                ///< of a block: products, scores, weights
  std::uint32_t operand[kN / 4];  ///< the weights as the A operand of the next product
  float reference[2];             ///< of the rows, lacks to_base2
  float sum[2];                   ///< of the rows' weights, this thread's
  float factor[2];                ///< what O must be multiplied by after raise()

  Weights() = default;
  __device__ __forceinline__ explicit Weights(float to_base2) : to_base2(to_base2) {}

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = -core::kInfinity;
    sum[0] = sum[1] = 0.0F;
  }
  __device__ __forceinline__ void clear_operand() {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) operand[i] = 0;
  }

  // ---- without a look for the greatest scores ----

  /// Scores become the operand at once. References are raised only if weights turn out too large,
  /// and then the weights are made anew. rescale(): O *= factor.
  template <class Rescale>
  __device__ __forceinline__ void weigh_at_once(const Rescale& rescale) {
    weigh_at_once(rescale, [](float weight, int) { return weight; });
  }
  /// element(weight, i): what enters the operand instead of the i-th weight, whose sums stay. Of
  /// scores kFrom to kTo.
  template <int kFrom = 0, int kTo = kN / 2, class Rescale, class Element>
  __device__ __forceinline__ void weigh_at_once(const Rescale& rescale, const Element& element) {
    float shift[2] = {reference[0] * to_base2 - kOffset, reference[1] * to_base2 - kOffset};
#pragma unroll 1
    for (std::uint32_t raised = ptx::opaque(0);; raised = ptx::opaque(1)) {
      float part[2];
      make_weights<kFrom, kTo>(
          shift, part, [&](float x, float y) { return fmaf(x, to_base2, -y); }, element);
      if (!agreed(raised == 0 && too_large(part))) {
        sum[0] += part[0];
        sum[1] += part[1];
        return;
      }
      float top[2];
      greatest<kFrom, kTo>(top);
      raise(top);
      rescale();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[half] = core::shift_of(reference[half]) * to_base2 - kOffset;
      }
    }
  }

  /// A few weights at a time, between products: as weigh_at_once, which makes them anew if they
  /// turn out too large.
  struct Pending {
    float shift[2], part[2];

    __device__ __forceinline__ bool too_large() const { return Weights::too_large(part); }
  };
  __device__ __forceinline__ Pending begin() const {
    return {{reference[0] * to_base2 - kOffset, reference[1] * to_base2 - kOffset}, {0.0F, 0.0F}};
  }
  /// After raise(): a row without any score has weights of 0 then.
  __device__ __forceinline__ Pending begin_raised() const {
    return {{core::shift_of(reference[0]) * to_base2 - kOffset,
             core::shift_of(reference[1]) * to_base2 - kOffset},
            {0.0F, 0.0F}};
  }
  /// The i-th score, an even one, and the next.
  __device__ __forceinline__ void weigh_pair(Pending& pending, int i) {
    float weight[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      weight[j] = ptx::ex2(fmaf(s[i + j], to_base2, -pending.shift[i / 2 % 2]));
      pending.part[i / 2 % 2] += weight[j];
    }
    operand[i / 2] = ptx::pack<kType>(weight[0], weight[1]);
  }
  __device__ __forceinline__ void keep(const Pending& pending) {
    sum[0] += pending.part[0];
    sum[1] += pending.part[1];
  }

  /// The same of raw products for which the softcap's short series is good. False: it is not, or
  /// weights turn out too large; only the operand has changed.
  __device__ __forceinline__ bool weigh_narrow(const core::SoftcapSeries& series) {
    const float shift[2] = {reference[0] * to_base2, reference[1] * to_base2};
    float part[2];
    float farthest = 0.0F;  // square; NaNs are beyond all limits
    make_weights(
        shift, part,
        [&](float x, float y) {
          farthest = __int_as_float(max(__float_as_int(farthest), __float_as_int(x * x)));
          return series.narrow(x) - y;
        },
        [](float weight, int) { return weight; });
    const float limit = series.narrow_limit;
    const bool narrow = __float_as_int(farthest) <= __float_as_int(limit * limit) && limit > 0.0F;
    if (agreed(!narrow || too_large(part))) return false;
    sum[0] += part[0];
    sum[1] += part[1];
    return true;
  }

  // ---- with it ----

  /// s becomes weights, and the rows' state follows. True: O must be multiplied by factor. top: of
  /// greatest_or_zero(). Raw products serve as well there: they are no smaller than scores.
  __device__ __forceinline__ bool soften(float (&top)[2], Uncapped raw,
                                         const core::SoftcapSeries& series) {
    bool raises = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raises |= (top[half] - reference[half]) * to_base2 > kSlack;
    }
    raises = agreed(raises);
    if (raises) {
      over_quad(top);
      if (agreed(top[0] == 0.0F || top[1] == 0.0F)) greatest(top);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (raw.wide) top[half] = series.wide(top[half]) / to_base2;
      }
      raise(top);
    }
    if (raw.narrow) {
      weigh_by([&](float x, float shift) { return series.narrow(x) - shift; });
    } else if (raw.wide) {
      weigh_by([&](float x, float shift) { return series.wide(x) - shift; });
    } else {
      weigh_in_place();
    }
    return raises;
  }

  // ---- where others have more of the rows' scores ----

  /// The greatest of this warp's.
  template <int kFrom = 0, int kTo = kN / 2>
  __device__ __forceinline__ void greatest(float (&top)[2]) const {
    top[0] = s[kFrom];
    top[1] = s[kFrom + 2];
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    over_quad(top);
  }
  /// Whether references must be raised to top.
  __device__ __forceinline__ bool exceeds(const float (&top)[2]) const {
    return (top[0] - reference[0]) * to_base2 > kSlack ||
           (top[1] - reference[1]) * to_base2 > kSlack;
  }
  /// References become the rows' greatest scores, where these are greater; what goes by them
  /// follows, but for O.
  __device__ __forceinline__ void raise(const float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(top[half], reference[half]);
      factor[half] =
          raised == -core::kInfinity ? 1.0F : ptx::ex2((reference[half] - raised) * to_base2);
      reference[half] = raised;
      sum[half] *= factor[half];
    }
  }
  /// s becomes weights.
  __device__ __forceinline__ void weigh_in_place() {
    weigh_by([&](float x, float shift) { return fmaf(x, to_base2, -shift); });
  }

  /// Weights in the storage type are the A operand as they lie: neighbouring groups of columns in
  /// pairs.
  __device__ __forceinline__ void make_operand() {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) operand[i] = ptx::pack<kType>(s[2 * i], s[2 * i + 1]);
  }

 private:
  /// exponent(score, shift): the operand becomes its powers of 2; part: their sums. A row without a
  /// reference has a shift of -inf and gets +inf or, for a masked score, NaN.
  template <int kFrom = 0, int kTo = kN / 2, class Exponent, class Element>
  __device__ __forceinline__ void make_weights(const float (&shift)[2], float (&part)[2],
                                               const Exponent& exponent, const Element& element) {
    part[0] = part[1] = 0.0F;
#pragma unroll
    for (int i = kFrom; i < kTo; i += 2) {
      float weight[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weight[j] = ptx::ex2(exponent(s[i + j], shift[i / 2 % 2]));
        part[i / 2 % 2] += weight[j];
      }
      operand[i / 2] = ptx::pack<kType>(element(weight[0], i), element(weight[1], i + 1));
    }
  }
  __device__ __forceinline__ static bool too_large(const float (&part)[2]) {
    return !(part[0] < kMost && part[1] < kMost);
  }

  /// exponent: base-2 scores, less the shift, of s. A block's weights are added up apart: one long
  /// sum of equal weights, as a softcap makes them, would err by more.
  template <class Exponent>
  __device__ __forceinline__ void weigh_by(const Exponent& exponent) {
    float shift[2], part[2] = {0.0F, 0.0F};
#pragma unroll
    for (int half = 0; half < 2; ++half) shift[half] = core::shift_of(reference[half]) * to_base2;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      s[i] = ptx::ex2(exponent(s[i], shift[i / 2 % 2]));
      part[i / 2 % 2] += s[i];
    }
    sum[0] += part[0];
    sum[1] += part[1];
  }

  __device__ __forceinline__ static void over_quad(float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 2));
    }
  }
};

}  // namespace tessera::cuda
