// In place of src/cuda/ptx/exact.h where a test runs a kernel on the host (cuda/host_threads.h).
#pragma once

#include <cmath>
#include <cstdint>

namespace tessera::cuda::ptx {

struct Exact {
  float x;

  Exact() = default;
  explicit Exact(float value) : x(value) {}
};

inline Exact operator+(Exact a, Exact b) { return Exact(a.x + b.x); }
inline Exact operator-(Exact a, Exact b) { return Exact(a.x - b.x); }
inline Exact operator-(Exact a) { return Exact(-a.x); }
inline Exact operator*(Exact a, Exact b) { return Exact(a.x * b.x); }
inline Exact operator/(Exact a, Exact b) { return Exact(a.x / b.x); }
inline Exact fused(Exact a, Exact b, Exact c) { return Exact(std::fma(a.x, b.x, c.x)); }
inline Exact larger_magnitude(Exact a, Exact b) { return Exact(std::fmax(a.x, std::fabs(b.x))); }
template <Dtype kType>
std::uint32_t larger_magnitudes(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger = 0;
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t x = a >> 16 * half & 0xFFFF, y = b >> 16 * half & 0x7FFF;
    const bool is_nan = y > (kType == Dtype::bf16 ? 0x7F80U : 0x7C00U);
    larger |= (is_nan || y < x ? x : y) << 16 * half;
  }
  return larger;
}
inline Exact with_sign(Exact x, std::uint32_t sign) {
  return Exact(__uint_as_float(__float_as_uint(x.x) ^ (sign & 0x80000000U)));
}

}  // namespace tessera::cuda::ptx
