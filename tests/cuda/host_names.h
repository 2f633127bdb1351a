// CUDA's names that mean the same however a kernel's threads run on the host: included by what runs
// them, host_threads.h and tests/device/cuda_names.h.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

// NOLINTBEGIN: CUDA's names
#define __device__
#define __forceinline__ inline

struct __attribute__((may_alias)) float2 {
  float x, y;
};
struct __attribute__((may_alias)) float4 {
  float x, y, z, w;
};
struct __attribute__((may_alias)) uint2 {
  std::uint32_t x, y;
};
struct __attribute__((may_alias)) uint4 {
  std::uint32_t x, y, z, w;
};

/// The four of eight bytes, x's first, that the selector's half bytes name.
inline std::uint32_t __byte_perm(std::uint32_t x, std::uint32_t y, std::uint32_t selector) {
  const std::uint64_t bytes = std::uint64_t{y} << 32 | x;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t from = selector >> 4 * i & 7;
    result |= static_cast<std::uint32_t>(bytes >> 8 * from & 0xff) << 8 * i;
  }
  return result;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline float __uint_as_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline std::uint32_t __float_as_uint(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
// NOLINTEND
