// exp2, log2 and tanh of vectors. Coefficients are minimax fits (Remez exchange, relative error)
// made for this file; tests/cpu/simd_test.cpp holds every function to the error stated here.
#pragma once

#include "cpu/simd.h"

namespace tessera::cpu::TESSERA_ISA {

/// 2^x for x < +inf, error 1.9e-7. Exact at integers; 0 where the result would be denormal, and for
/// -inf; +inf from 128 up; NaN stays NaN.
template <class T>
TESSERA_INLINE T exp2(T x) {
  T f;
  const T scale = split_exp2(x, f);
  T y = fma(T(1.86713047714e-3F), f, T(9.01702930529e-3F));
  y = fma(y, f, T(5.57999139997e-2F));
  y = fma(y, f, T(0.240164449828F));
  y = fma(y, f, T(0.693151311848F));
  y = fma(y, f, T(1.0F));
  return join_exp2(y, scale);
}

/// 2^x, error 3.0e-6, for results that are rounded to bf16. The ends as in exp2.
template <class T>
TESSERA_INLINE T exp2_short(T x) {
  T f;
  const T scale = split_exp2(x, f);
  T y = fma(T(1.34266856493e-2F), f, T(5.22424728462e-2F));
  y = fma(y, f, T(0.241280204274F));
  y = fma(y, f, T(0.693044845443F));
  y = fma(y, f, T(1.0F));
  return join_exp2(y, scale);
}

/// log2(x), error 2.2e-7, also near 1. -inf for 0, NaN below, +inf for +inf; denormals are seen as
/// what they are.
template <class T>
TESSERA_INLINE T log2(T x) {
  const auto tiny = x < T(0x1p-126F);
  const T normal = select(tiny, x * T(0x1p24F), x);
  // normal = 2^e * m with m in [sqrt(1/2), sqrt(2)): 0x3F3504F3 is sqrt(1/2).
  const auto shifted = bits(normal) - bits(T(0.70710678F));
  const T e = to_f32(i32_from_bits(shifted) >> 23) - select(tiny, T(24.0F), T(0.0F));
  const T m = f32_from_bits((shifted & U32(0x007FFFFFU)) + bits(T(0.70710678F)));
  // log2(m) = s * P(s^2), s = (m - 1) / (m + 1): the relative error stays small near m = 1.
  const T s = (m - T(1.0F)) / (m + T(1.0F));
  const T t = s * s;
  T p = fma(T(0.431735879208F), t, T(0.576714383962F));
  p = fma(p, t, T(0.961798847642F));
  p = fma(p, t, T(2.88539007979F));
  T y = fma(p, s, e);
  y = select(x == T(__builtin_huge_valf()), x, y);
  y = select(x == T(0.0F), T(-__builtin_huge_valf()), y);
  return select(x >= T(0.0F), y, T(__builtin_nanf("")));
}

/// tanh(x), error 2.5e-7, also near 0; +-1 for large arguments, NaN stays NaN.
template <class T>
TESSERA_INLINE T tanh(T x) {
  // tanh = m / (m + 2) with m = exp(2x) - 1, built so that nothing cancels: 2x log2(e) = n + f,
  // m = 2^n (2^f - 1) + (2^n - 1), and 2^f - 1 = f Q(f) by a fit of its own.
  const T bound(30.0F);
  const T y = max(-bound, min(bound, x * T(2.8853900817779268F)));
  const auto n = round_to_i32(y);
  const T f = y - to_f32(n);
  T q = fma(T(1.54035151094e-4F), f, T(1.33907356637e-3F));
  q = fma(q, f, T(9.61823748414e-3F));
  q = fma(q, f, T(5.55035743327e-2F));
  q = fma(q, f, T(0.240226497951F));
  q = fma(q, f, T(0.693147187927F));
  const T power = f32_from_bits((bits(n) + U32(127U)) << 23);
  const T m = fma(power, f * q, power - T(1.0F));
  return m / (m + T(2.0F));
}

}  // namespace tessera::cpu::TESSERA_ISA
