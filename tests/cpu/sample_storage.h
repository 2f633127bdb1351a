// Arrays of any storage type in the CPU's tests. Conversions are written here again, so that the
// kernels' are tested too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tessera/types.hpp"

namespace tessera::forward_sample {

constexpr double kInf = std::numeric_limits<double>::infinity();

inline std::uint16_t to_bf16(float x) {
  std::uint32_t u = 0;
  std::memcpy(&u, &x, 4);
  return static_cast<std::uint16_t>((u + 0x7FFFU + ((u >> 16) & 1U)) >> 16);
}

inline float from_bf16(std::uint16_t h) {
  const std::uint32_t u = std::uint32_t{h} << 16;
  float x = 0;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float from_f16(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const float sign = (h & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 31) return mantissa != 0 ? std::nanf("") : sign * static_cast<float>(kInf);
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-24F;
  const std::int64_t shifted = std::int64_t{mantissa + 1024} << exponent;
  return sign * static_cast<float>(shifted) * 0x1p-25F;
}

inline std::uint16_t to_f16(float x) {  // of moderate numbers and NaN
  if (std::isnan(x)) return 0x7E00;
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float a = std::fabs(x);
  int binade = 0;  // spacing 2^-24 below 2^-13, twice as much in every binade from there
  float spacing = 0x1p-24F;
  while (a >= spacing * 2048.0F) {
    ++binade;
    spacing *= 2.0F;
  }
  const auto steps = static_cast<int>(std::nearbyint(a / spacing));
  return static_cast<std::uint16_t>(sign | (steps + 1024 * binade));
}

inline float from_e4m3(std::uint8_t h) {
  if ((h & 0x7F) == 0x7F) return std::nanf("");
  const int exponent = (h >> 3) & 15, fraction = h & 7;
  const float size = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 8),
                                std::max(exponent, 1) - 10);
  return (h & 0x80) != 0 ? -size : size;
}

inline std::uint8_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float a = std::min(std::fabs(x), 448.0F);
  int binade = 0;  // spacing 2^-9 below 2^-5, twice as much in every binade from there
  float spacing = 0x1p-9F;
  while (a >= spacing * 16.0F) {
    ++binade;
    spacing *= 2.0F;
  }
  return static_cast<std::uint8_t>(sign |
                                   (static_cast<int>(std::nearbyint(a / spacing)) + 8 * binade));
}

/// Elements of one dtype in raw memory.
struct Array {
  Dtype dtype = Dtype::f32;
  std::vector<std::byte> bytes;

  void resize(Dtype type, std::int64_t n) {
    dtype = type;
    bytes.assign(static_cast<std::size_t>(n * size_of(type)), std::byte{0});
  }
  std::int64_t size() const { return static_cast<std::int64_t>(bytes.size()) / size_of(dtype); }
  double get(std::int64_t i) const {
    const std::byte* p = bytes.data() + i * size_of(dtype);
    if (dtype == Dtype::f32) {
      float x = 0;
      std::memcpy(&x, p, 4);
      return x;
    }
    if (dtype == Dtype::e4m3) return from_e4m3(std::to_integer<std::uint8_t>(*p));
    if (dtype == Dtype::i8) return static_cast<std::int8_t>(*p);
    std::uint16_t h = 0;
    std::memcpy(&h, p, 2);
    return dtype == Dtype::bf16 ? from_bf16(h) : from_f16(h);
  }
  std::vector<double> numbers() const {
    std::vector<double> all(static_cast<std::size_t>(size()));
    for (std::int64_t i = 0; i < size(); ++i) all[static_cast<std::size_t>(i)] = get(i);
    return all;
  }
  void set(std::int64_t i, float x) {
    std::byte* p = bytes.data() + i * size_of(dtype);
    if (dtype == Dtype::f32) {
      std::memcpy(p, &x, 4);
      return;
    }
    if (dtype == Dtype::e4m3) {
      *p = std::byte{to_e4m3(x)};
      return;
    }
    if (dtype == Dtype::i8) {  // which has no NaN
      const float most = std::isnan(x) ? 127.0F : std::max(-127.0F, std::min(127.0F, x));
      *p = static_cast<std::byte>(static_cast<std::int8_t>(std::nearbyint(most)));
      return;
    }
    const std::uint16_t h = dtype == Dtype::bf16 ? to_bf16(x) : to_f16(x);
    std::memcpy(p, &h, 2);
  }
  /// A NaN of its own kind everywhere, or the largest number of i8: what a kernel must neither use
  /// nor overwrite.
  void poison() {
    for (std::int64_t i = 0; i < size(); ++i) {
      if (dtype == Dtype::f32) {
        const std::uint32_t nan = 0x7FC0ABCD;
        std::memcpy(bytes.data() + i * 4, &nan, 4);
      } else if (size_of(dtype) == 1) {
        bytes[static_cast<std::size_t>(i)] = std::byte{0x7F};
      } else {
        const std::uint16_t nan = 0x7FCD;
        std::memcpy(bytes.data() + i * 2, &nan, 2);
      }
    }
  }
};

}  // namespace tessera::forward_sample
