// Single instructions on registers. PTX ISA, "Floating Point Instructions".
#pragma once

#include <cstdint>

#include "tessera/types.hpp"

namespace tessera::cuda::ptx {

/// 2^x, relative error 2^-22; results below the normal range become 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / x, error one unit in the last place; results below the normal range become 0.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// `count` ones from bit `first` on; both 0 to 32.
__device__ __forceinline__ std::uint32_t bits(int first, int count) {
  std::uint32_t y;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(y) : "r"(first), "r"(count));
  return y;
}
/// An int32, given by the bits of an fp32, as fp32; made where it stands in a loop.
__device__ __forceinline__ float widen_integer(float bits) {
  float y;
  asm volatile("cvt.rn.f32.s32 %0, %1;" : "=f"(y) : "r"(__float_as_int(bits)));
  return y;
}
/// x, of which the compiler knows nothing: it does not look through to what it was made of.
__device__ __forceinline__ std::uint32_t opaque(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// An fp16, given by its bits.
__device__ __forceinline__ float widen_f16(std::uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

/// An element of a 16-bit type, given by its bits.
template <Dtype kType>
__device__ __forceinline__ float widen(std::uint16_t bits) {
  static_assert(kType == Dtype::bf16 || kType == Dtype::f16);
  return kType == Dtype::bf16 ? __uint_as_float(std::uint32_t{bits} << 16) : widen_f16(bits);
}

/// Two fp32 rounded to a pair of the 16-bit type, `low` in the low half.
template <Dtype kType>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  static_assert(kType == Dtype::bf16 || kType == Dtype::f16);
  std::uint32_t pair;
  if constexpr (kType == Dtype::bf16) {
#if __CUDA_ARCH__ < 800
    const auto round = [](float x) {
      const std::uint32_t bits = __float_as_uint(x);
      const std::uint32_t up = (bits >> 16 & 1) + 0x7FFFU;
      return x != x ? 0x7FFFU : bits + up >> 16;
    };
    pair = round(low) | round(high) << 16;
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  } else {
#if __CUDA_ARCH__ < 800
    asm("{\n.reg .b16 low, high;\ncvt.rn.f16.f32 low, %1;\ncvt.rn.f16.f32 high, %2;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(pair)
        : "f"(low), "f"(high));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  }
  return pair;
}

#if __CUDA_ARCH__ >= 890
/// Four fp32 as e4m3, rounded to nearest even and no larger than 448; a in the lowest byte. NaN
/// becomes 0x7F.
__device__ __forceinline__ std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  std::uint32_t four;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

/// Four numbers of e4m3, each times x.
__device__ __forceinline__ std::uint32_t scale_e4m3(std::uint32_t four, float x) {
  std::uint32_t result;
  asm("{\n.reg .b16 a, b, h;\n.reg .b32 c, d, f;\n"
      "mov.b32 {a, b}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 c, a;\ncvt.rn.f16x2.e4m3x2 d, b;\n"
      "cvt.rn.f16.f32 h, %2;\nmov.b32 f, {h, h};\n"
      "mul.rn.f16x2 c, c, f;\nmul.rn.f16x2 d, d, f;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 a, c;\ncvt.rn.satfinite.e4m3x2.f16x2 b, d;\n"
      "mov.b32 %0, {a, b};\n}"
      : "=r"(result)
      : "r"(four), "f"(x));
  return result;
}
#endif

/// Bytes of a (numbers 0 to 3) and b (4 to 7), picked by the digits of `selector`, the last one for
/// the lowest byte.
template <std::uint32_t kSelector>
__device__ __forceinline__ std::uint32_t permute(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "n"(kSelector));
  return y;
}

/// Products of two pairs of fp16.
__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

/// Four elements of 8 bits as two pairs of fp16, which hold them exactly.
template <Dtype kType>
__device__ __forceinline__ void widen_four(std::uint32_t four, std::uint32_t& low,
                                           std::uint32_t& high) {
  if constexpr (kType == Dtype::e4m3) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
#else
    // The bits of an e4m3 are those of an fp16 that is 2^-8 of it; but for NaN, whose are all ones.
    constexpr std::uint32_t k256 = 0x5C005C00U;
    const std::uint32_t nan = ((four & 0x7F7F7F7FU) + 0x01010101U) & 0x80808080U;
    const std::uint32_t ones = nan - (nan >> 7);
    const auto widen_two = [](std::uint32_t bytes, std::uint32_t ones_of) {
      std::uint32_t two = (bytes & 0x80008000U) | (bytes & 0x7F007F00U) >> 1;
      asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(two) : "r"(k256));
      return two | ones_of;
    };
    low = widen_two(permute<0x1404>(four, 0), permute<0x1404>(ones, 0));
    high = widen_two(permute<0x3424>(four, 0), permute<0x3424>(ones, 0));
#endif
  } else {
    static_assert(kType == Dtype::i8);
    // 0x6400 is 1024, whose last place is 1: plus the number and 128.
    constexpr std::uint32_t kThousand = 0x64646464U, kMiddle = 0x64806480U;
    four ^= 0x80808080U;
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(low)
        : "r"(permute<0x4140>(four, kThousand)), "r"(kMiddle));
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(high)
        : "r"(permute<0x4342>(four, kThousand)), "r"(kMiddle));
  }
}

}  // namespace tessera::cuda::ptx
