// The bit patterns of bf16 (the upper half of an fp32) and IEEE binary16.
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

}  // namespace

double load(Dtype dtype, const void* data, std::int64_t index) {
  if (dtype == Dtype::bf16) return decode_bf16(bits16(data, index));
  if (dtype == Dtype::f16) return decode_f16(bits16(data, index));
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
  const std::uint16_t bits = dtype == Dtype::bf16 ? encode_bf16(narrow) : encode_f16(narrow);
  std::memcpy(static_cast<char*>(data) + 2 * index, &bits, 2);
}

float round_to(Dtype dtype, float value) {
  if (dtype == Dtype::f32) return value;
  if (dtype == Dtype::bf16) return static_cast<float>(decode_bf16(encode_bf16(value)));
  return static_cast<float>(decode_f16(encode_f16(value)));
}

double unit_roundoff(Dtype dtype) {
  if (dtype == Dtype::f32) return 0x1p-24;
  return dtype == Dtype::bf16 ? 0x1p-8 : 0x1p-11;
}

double subnormal_roundoff(Dtype dtype) { return dtype == Dtype::f16 ? 0x1p-25 : 0x1p-126; }

}  // namespace tessera::reference
