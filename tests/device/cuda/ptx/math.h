// In place of src/cuda/ptx/math.h where a kernel runs on fibers (fibers.h).
#pragma once

#include <bit>

#include "cuda_names.h"
#include "reference/storage.h"
#include "tessera/types.hpp"

namespace tessera::cuda::ptx {

/// NaN is a positive one, as a GPU's are.
inline float ex2(float x) { return std::isnan(x) ? __uint_as_float(0x7fffffffU) : std::exp2(x); }
inline float rcp(float x) { return 1.0F / x; }
inline std::uint32_t bits(int first, int count) {
  const std::uint64_t ones = (std::uint64_t{1} << count) - 1;
  return static_cast<std::uint32_t>(ones << first);
}
inline std::uint32_t opaque(std::uint32_t x) { return x; }
inline float widen_integer(float bits) {
  return static_cast<float>(std::bit_cast<std::int32_t>(bits));
}

inline float widen_f16(std::uint16_t bits) {
  return static_cast<float>(reference::load(Dtype::f16, &bits, 0));
}
template <Dtype kType>
float widen(std::uint16_t bits) {
  return static_cast<float>(reference::load(kType, &bits, 0));
}
template <Dtype kType>
std::uint32_t pack(float low, float high) {
  std::uint16_t pair[2];
  reference::store(kType, pair, 0, static_cast<double>(low));
  reference::store(kType, pair, 1, static_cast<double>(high));
  return pair[0] | std::uint32_t{pair[1]} << 16;
}
template <std::uint32_t kSelector>
std::uint32_t permute(std::uint32_t a, std::uint32_t b) {
  const std::uint64_t bytes = a | std::uint64_t{b} << 32;
  std::uint32_t y = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned from = kSelector >> (4 * i) & 7;
    y |= static_cast<std::uint32_t>(bytes >> (8 * from) & 0xFF) << (8 * i);
  }
  return y;
}
/// Products of two pairs of fp16.
inline std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  const auto product = [&](int at) {
    return widen_f16(static_cast<std::uint16_t>(a >> at)) *
           widen_f16(static_cast<std::uint16_t>(b >> at));
  };
  return pack<Dtype::f16>(product(0), product(16));
}
/// Four elements of 8 bits as two pairs of fp16.
template <Dtype kType>
void widen_four(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  float x[4];
  for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(reference::load(kType, &four, i));
  low = pack<Dtype::f16>(x[0], x[1]);
  high = pack<Dtype::f16>(x[2], x[3]);
}
inline std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  std::uint32_t four = 0;
  int i = 0;
  for (const float x : {a, b, c, d}) {
    reference::store(Dtype::e4m3, &four, i++, static_cast<double>(x));
  }
  return four;
}
/// Four numbers of e4m3, each times x.
inline std::uint32_t scale_e4m3(std::uint32_t four, float x) {
  float y[4];
  for (int i = 0; i < 4; ++i) y[i] = static_cast<float>(reference::load(Dtype::e4m3, &four, i));
  return pack_e4m3(y[0] * x, y[1] * x, y[2] * x, y[3] * x);
}

}  // namespace tessera::cuda::ptx
