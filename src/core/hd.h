// TESSERA_HD marks a function for host and device. It is always inlined: the CPU kernels are
// compiled once per instruction set, and no out-of-line copy of a shared function may carry one
// set's code into another's translation unit.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_HD __host__ __device__ __forceinline__
#else
#define TESSERA_HD inline __attribute__((always_inline))
#endif

namespace tessera::core {

inline constexpr float kLog2e = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000U);

template <class T>
TESSERA_HD constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
TESSERA_HD constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
TESSERA_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
TESSERA_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// Scalar forms of the SIMD layer's lane-wise functions, so that one template serves both.
#if defined(__CUDACC__)
TESSERA_HD float exp2(float x) { return ::exp2f(x); }
TESSERA_HD float log2(float x) { return ::log2f(x); }
TESSERA_HD float tanh(float x) { return ::tanhf(x); }
/// a * b, rounded on its own: compilers for GPUs fuse a product into the sum that it enters.
TESSERA_HD float multiply(float a, float b) { return __fmul_rn(a, b); }
#else
TESSERA_HD float exp2(float x) { return __builtin_exp2f(x); }
TESSERA_HD float log2(float x) { return __builtin_log2f(x); }
TESSERA_HD float tanh(float x) { return __builtin_tanhf(x); }
template <class T>
TESSERA_HD T multiply(T a, T b) {
  return a * b;
}
/// a * b + c, rounded once.
TESSERA_HD float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif
TESSERA_HD constexpr float select(bool condition, float if_true, float if_false) {
  return condition ? if_true : if_false;
}

}  // namespace tessera::core
