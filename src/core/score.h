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
  float scale = 0.0F;  ///< softmax_scale, the derivative's factor
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

/// tanh(pre x) / pre as a polynomial, for GPUs, where tanh takes two of their rare special
/// functions: x P(x^2), relative error 4e-7 where x^2 <= limit, that is |pre x| <= 0.7.
struct SoftcapSeries {
  float c[5] = {};
  float limit = 0.0F;
};

TESSERA_HD constexpr SoftcapSeries make_softcap_series(float pre) {
  // Minimax for tanh(sqrt(t)) / sqrt(t) on [0, 0.49].
  constexpr double kCoefficients[] = {0.999999697, -0.333302129, 0.132811125, -0.0508362346,
                                      0.0137737092};
  SoftcapSeries series;
  double power = 1.0;
  for (int i = 0; i < 5; ++i) {
    series.c[i] = static_cast<float>(kCoefficients[i] * power);
    power *= static_cast<double>(pre) * pre;
  }
  series.limit = 0.49F / (pre * pre);
  return series;
}

/// x2 = x^2, at most limit.
TESSERA_HD constexpr float series_capped(const SoftcapSeries& series, float x, float x2) {
  float p = series.c[4];
  for (int i = 3; i >= 0; --i) p = p * x2 + series.c[i];
  return x * p;
}

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

}  // namespace tessera::core
