// How a raw product q.k becomes the base-2 score that enters the softmax (S1): scale, softcap,
// bias, ALiBi, in that order; the mask comes after. Everything is folded to base 2 once, so that
// kernels only ever call exp2. T is float or a vector of floats; tanh is found by
// argument-dependent lookup.
#pragma once

#include "core/hd.h"

namespace tessera::core {

/// softmax_scale and softcap, folded.
///   no softcap: score2 = (q.k) * pre,              pre = softmax_scale * log2(e)
///   softcap:    score2 = tanh((q.k) * pre) * post, pre = softmax_scale / softcap, post = softcap *
///   log2(e)
struct Score {
  float pre = 0.0F;
  float post = 1.0F;
  bool capped = false;
  float scale = 0.0F;  ///< softmax_scale, the last factor of the derivative: score_gradient
};

TESSERA_HD constexpr Score make_score(float softmax_scale, float softcap) {
  if (softcap > 0.0F) return {softmax_scale / softcap, softcap * kLog2e, true, softmax_scale};
  return {softmax_scale * kLog2e, 1.0F, false, softmax_scale};
}

/// tanh(q.k * pre): the softcapped score before it is stretched; only for capped scores.
template <class T>
TESSERA_HD T capped_tanh(const Score& score, T qk) {
  return tanh(qk * T(score.pre));
}

/// The base-2 score before bias and mask.
template <class T>
TESSERA_HD T score2(const Score& score, T qk) {
  if (!score.capped) return qk * T(score.pre);
  return capped_tanh(score, qk) * T(score.post);
}

/// x P(x^2).
template <int kTerms>
struct OddPolynomial {
  float c[kTerms] = {};

  TESSERA_HD constexpr float operator()(float x) const {
    const float x2 = x * x;
    float p = c[kTerms - 1];
    for (int i = kTerms - 2; i >= 0; --i) p = p * x2 + c[i];
    return x * p;
  }
};

/// A capped score2 as polynomials of the raw product x, for GPUs, where tanh takes two of their
/// rare special functions. Relative error 4e-7 where |x| is at most the limit: |pre x| <= 0.25 for
/// the short one, 0.7 for the long one, which is good wherever the short one is. A limit below 0:
/// good nowhere. Both make a masked -inf a weight of 0, where they are chosen.
struct SoftcapSeries {
  OddPolynomial<5> wide;
  float wide_limit = -1.0F;
  OddPolynomial<3> narrow;
  float narrow_limit = -1.0F;
};

TESSERA_HD constexpr SoftcapSeries make_softcap_series(const Score& score) {
  // Minimax for tanh(sqrt(t)) / sqrt(t) on [0, 0.25^2] and [0, 0.7^2].
  constexpr double kNarrow[] = {0.9999996043, -0.3332190823, 0.1284161343};
  constexpr double kWide[] = {0.999999697, -0.333302129, 0.132811125, -0.0508362346, 0.0137737092};
  constexpr double kLeast = 1.2e-38, kGreatest = 3e38;  // of floats
  SoftcapSeries series;
  const double pre = score.pre;
  double factor = pre * score.post, last = 0.0;
  for (int i = 0; i < 5; ++i) {
    last = kWide[i] * factor;
    if (last > kGreatest) return {};
    if (i < 3) series.narrow.c[i] = static_cast<float>(kNarrow[i] * factor);
    series.wide.c[i] = static_cast<float>(last);
    factor *= pre * pre;
  }
  series.narrow_limit = static_cast<float>(min(0.25 / pre, 1e7));
  series.wide_limit = static_cast<float>(0.7 / pre);
  // A last coefficient of 0 would be multiplied by infinity where a score is masked. The short
  // series' becomes the least float, which up to 1e7 is next to nothing; the long one is given up.
  series.narrow.c[2] = max(series.narrow.c[2], static_cast<float>(kLeast));
  if (last < kLeast) {
    for (int i = 0; i < 5; ++i) series.wide.c[i] = i < 3 ? series.narrow.c[i] : 0.0F;
    series.wide_limit = series.narrow_limit;
  }
  return series;
}

/// Elements from one of an additive bias (batch, num_heads, seqlen_q, seqlen_k), or of its
/// gradient, to the next along each dimension; 0: all share one.
struct BiasStrides {
  std::int64_t batch = 0, head = 0, query = 0, key = 0;

  TESSERA_HD constexpr std::int64_t offset(std::int64_t at_batch, std::int64_t at_head,
                                           std::int64_t at_query, std::int64_t at_key) const {
    return at_batch * batch + at_head * head + at_query * query + at_key * key;
  }
  friend constexpr bool operator==(const BiasStrides&, const BiasStrides&) = default;
};

/// d(score) / d(q.k), less the factor softmax_scale, of a capped score (chain rule of S1): 1 -
/// tanh^2, made from 1 - |tanh| = 2 / (1 + exp(2 |x|)), since it would cancel where tanh is
/// nearly 1.
template <class T>
TESSERA_HD T score_slope(const Score& score, T qk) {
  const T x = qk * T(score.pre);
  const T rest = T(2.0F) / (T(1.0F) + exp2(max(x, -x) * T(2.0F * kLog2e)));
  return rest * (T(2.0F) - rest);
}

/// ALiBi's base-2 penalty (S6): -slope * |i + seqlen_k - seqlen_q - j|, added to score2.
template <class T>
TESSERA_HD T alibi2(T slope, T distance) {
  return slope * T(-kLog2e) * distance;
}

/// What is added to a base-2 score before the mask (S1), in this order: a bias in base 2, then
/// ALiBi; each only where it is given.
template <class T>
TESSERA_HD constexpr T add_to_score(T score2, bool has_bias, T bias2, bool has_alibi, T slope,
                                    T distance) {
  if (has_bias) score2 += bias2;
  if (has_alibi) score2 += alibi2(slope, distance);
  return score2;
}

/// What a score passes on of its gradient.
template <class T>
struct ScoreGradient {
  T bias;     ///< to the bias
  T product;  ///< to q.k, less the factor softmax_scale
};

/// The derivative of S1, from its end to its beginning; dS is that of the score which enters the
/// softmax, 0 where the mask hides it:
///   dS -> dBias, as it is -> times softcap's slope -> times softmax_scale
/// ALiBi is a constant and takes nothing. The last factor is left to dQ and dK, which take it once
/// an element, where they are written. slope: score_slope, of a capped score only.
template <class T>
TESSERA_HD constexpr ScoreGradient<T> score_gradient(const Score& score, T ds, T slope) {
  return {ds, score.capped ? ds * slope : ds};
}

}  // namespace tessera::core
