// In place of src/cuda/ptx/math.h where a test runs a kernel on the host (cuda/host_threads.h).
#pragma once

#include <cstdint>

#include "files/convert.h"
#include "reference/storage.h"
#include "tessera/types.hpp"

namespace tessera::cuda::ptx {

inline float ex2(float x) { return __builtin_exp2f(x); }
inline std::uint32_t bits(int first, int count) {
  const std::uint64_t ones = (std::uint64_t{1} << count) - 1;
  return static_cast<std::uint32_t>(ones << first);
}
inline std::uint32_t opaque(std::uint32_t x) { return x; }
inline float widen_f16(std::uint16_t bits) { return tools::from_f16(bits); }

template <Dtype kType>
inline float widen(std::uint16_t bits) {
  return kType == Dtype::bf16 ? __uint_as_float(std::uint32_t{bits} << 16) : widen_f16(bits);
}

template <Dtype kType>
std::uint32_t pack(float low, float high) {
  const auto round = [](float x) {
    return std::uint32_t{kType == Dtype::bf16 ? tools::to_bf16(double{x})
                                              : tools::to_f16(double{x})};
  };
  return round(low) | round(high) << 16;
}

/// By the reference, not by what the CPU's kernels have in common with GPUs'.
inline std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  const auto round = [](float x) -> std::uint32_t {
    if (x != x) return 0x7F;  // of either sign
    std::uint8_t byte = 0;
    reference::store(Dtype::e4m3, &byte, 0, double{x});
    return byte;
  };
  return round(a) | round(b) << 8 | round(c) << 16 | round(d) << 24;
}

}  // namespace tessera::cuda::ptx
