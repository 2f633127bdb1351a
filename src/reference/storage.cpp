// The bit patterns of bf16 (the upper half of an fp32), IEEE binary16, and e4m3 of OCP's 8-bit
// formats.
#include "reference/storage.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace tessera::reference {
namespace {

std::uint16_t bits16(const void* data, std::int64_t index) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(data) + 2 * index, 2);
  return bits;
}

double decode_bf16(std::uint16_t bits) {
  return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
}

std::uint16_t encode_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

double decode_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double value =
      exponent == 0 ? fraction * 0x1p-24 : (1024 + fraction) * power_of_two(exponent - 25);
  if (exponent == 31) value = fraction != 0 ? std::nan("") : HUGE_VAL;
  return (bits & 0x8000) != 0 ? -value : value;
}

std::uint16_t encode_f16(float value) {
  const unsigned sign = std::signbit(value) ? 0x8000U : 0U;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00U);
  const double size = std::fabs(static_cast<double>(value));
  if (size >= 65520.0) return static_cast<std::uint16_t>(sign | 0x7C00U);
  // Spacing of the f16 numbers around `size`: 2^(e-10) for size in [2^e, 2^(e+1)), 2^-24 at least.
  const int binade = static_cast<int>(std::bit_cast<std::uint64_t>(size) >> 52) - 1023;
  const int exponent = std::max(binade - 10, -24);
  const auto steps = static_cast<unsigned>(std::nearbyint(size * power_of_two(-exponent)));
  // Steps carry into the exponent field by themselves: 1024 steps are one binade.
  return static_cast<std::uint16_t>(sign | (steps + (static_cast<unsigned>(exponent + 24) << 10)));
}

double decode_e4m3(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 15, fraction = bits & 7;
  if ((bits & 0x7F) == 0x7F) return std::nan("");
  const double size =
      exponent == 0 ? fraction * 0x1p-9 : (8 + fraction) * power_of_two(exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}

/// Saturates: no value but NaN becomes NaN.
std::uint8_t encode_e4m3(float value) {
  const unsigned sign = std::signbit(value) ? 0x80U : 0U;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7FU);
  const double size = std::min(std::fabs(static_cast<double>(value)), 448.0);
  const int binade = static_cast<int>(std::bit_cast<std::uint64_t>(size) >> 52) - 1023;
  const int exponent = std::max(binade - 3, -9);
  const auto steps = static_cast<unsigned>(std::nearbyint(size * power_of_two(-exponent)));
  return static_cast<std::uint8_t>(sign | (steps + (static_cast<unsigned>(exponent + 9) << 3)));
}

std::int8_t encode_i8(float value) {
  return static_cast<std::int8_t>(std::nearbyint(std::clamp(value, -127.0F, 127.0F)));
}

}  // namespace

double load(Dtype dtype, const void* data, std::int64_t index) {
  if (dtype == Dtype::bf16) return decode_bf16(bits16(data, index));
  if (dtype == Dtype::f16) return decode_f16(bits16(data, index));
  if (dtype == Dtype::e4m3) return decode_e4m3(static_cast<const std::uint8_t*>(data)[index]);
  if (dtype == Dtype::i8) return static_cast<double>(static_cast<const std::int8_t*>(data)[index]);
  float value = 0.0F;
  std::memcpy(&value, static_cast<const char*>(data) + 4 * index, 4);
  return static_cast<double>(value);
}

void store(Dtype dtype, void* data, std::int64_t index, double value) {
  const auto narrow = static_cast<float>(value);
  if (dtype == Dtype::f32) {
    std::memcpy(static_cast<char*>(data) + 4 * index, &narrow, 4);
    return;
  }
  if (dtype == Dtype::e4m3) {
    static_cast<std::uint8_t*>(data)[index] = encode_e4m3(narrow);
    return;
  }
  if (dtype == Dtype::i8) {
    static_cast<std::int8_t*>(data)[index] = encode_i8(narrow);
    return;
  }
  const std::uint16_t bits = dtype == Dtype::bf16 ? encode_bf16(narrow) : encode_f16(narrow);
  std::memcpy(static_cast<char*>(data) + 2 * index, &bits, 2);
}

float round_to(Dtype dtype, float value) {
  if (dtype == Dtype::f32) return value;
  if (dtype == Dtype::bf16) return static_cast<float>(decode_bf16(encode_bf16(value)));
  if (dtype == Dtype::e4m3) return static_cast<float>(decode_e4m3(encode_e4m3(value)));
  if (dtype == Dtype::i8) return static_cast<float>(encode_i8(value));
  return static_cast<float>(decode_f16(encode_f16(value)));
}

double unit_roundoff(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return 0x1p-24;
    case Dtype::bf16: return 0x1p-8;
    case Dtype::f16: return 0x1p-11;
    case Dtype::e4m3: return 0x1p-4;
    case Dtype::i8: break;
  }
  return 0.0;  // steps of one, whatever the value
}

double subnormal_roundoff(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
    case Dtype::bf16: return 0x1p-126;
    case Dtype::f16: return 0x1p-25;
    case Dtype::e4m3: return 0x1p-10;
    case Dtype::i8: break;
  }
  return 0.5;
}

}  // namespace tessera::reference
