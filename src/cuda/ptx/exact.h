// fp32 as IEEE has it: the build lets the compiler flush what is subnormal, fuse products with sums
// and divide roughly, which no instruction written here allows. PTX ISA, "Floating Point
// Instructions".
#pragma once

#include <cstdint>

#include "tessera/types.hpp"

namespace tessera::cuda::ptx {

struct Exact {
  float x;

  Exact() = default;
  __device__ __forceinline__ explicit Exact(float value) : x(value) {}
};

__device__ __forceinline__ Exact operator+(Exact a, Exact b) {
  Exact y;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(y.x) : "f"(a.x), "f"(b.x));
  return y;
}
__device__ __forceinline__ Exact operator-(Exact a, Exact b) {
  Exact y;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(y.x) : "f"(a.x), "f"(b.x));
  return y;
}
__device__ __forceinline__ Exact operator-(Exact a) {
  Exact y;
  asm("neg.f32 %0, %1;" : "=f"(y.x) : "f"(a.x));
  return y;
}
__device__ __forceinline__ Exact operator*(Exact a, Exact b) {
  Exact y;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(y.x) : "f"(a.x), "f"(b.x));
  return y;
}
__device__ __forceinline__ Exact operator/(Exact a, Exact b) {
  Exact y;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(y.x) : "f"(a.x), "f"(b.x));
  return y;
}
/// a * b + c, rounded once.
__device__ __forceinline__ Exact fused(Exact a, Exact b, Exact c) {
  Exact y;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y.x) : "f"(a.x), "f"(b.x), "f"(c.x));
  return y;
}
/// The larger of a and |b|; a where b is NaN.
__device__ __forceinline__ Exact larger_magnitude(Exact a, Exact b) {
  Exact y;
  asm("{\n.reg .f32 size;\nabs.f32 size, %2;\nmax.f32 %0, %1, size;\n}"
      : "=f"(y.x)
      : "f"(a.x), "f"(b.x));
  return y;
}
/// The larger of a and |b| of each of two numbers of 16 bits, a's not negative; a where b is NaN.
template <Dtype kType>
__device__ __forceinline__ std::uint32_t larger_magnitudes(std::uint32_t a, std::uint32_t b) {
  const std::uint32_t sizes = b & 0x7FFF7FFFU;
#if __CUDA_ARCH__ >= 800
  std::uint32_t y;
  if constexpr (kType == Dtype::bf16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(sizes));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(sizes));
  }
  return y;
#else
  constexpr std::uint32_t kInfinite = kType == Dtype::bf16 ? 0x7F80U : 0x7C00U;
  const auto larger = [](std::uint32_t x, std::uint32_t y) {
    return y > kInfinite || y < x ? x : y;
  };
  return larger(a & 0xFFFF, sizes & 0xFFFF) | larger(a >> 16, sizes >> 16) << 16;
#endif
}
/// x, negated where the sign of `sign` is set.
__device__ __forceinline__ Exact with_sign(Exact x, std::uint32_t sign) {
  return Exact(__uint_as_float(__float_as_uint(x.x) ^ (sign & 0x80000000U)));
}

}  // namespace tessera::cuda::ptx
