#include "files/convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <utility>

namespace tessera::tools {
namespace {

/// Rounds to a 16-bit format with `kMantissa` stored bits. The value is scaled so that the format's
/// spacing around it becomes 1: rounding is then nearbyint(), and the rounded integer plus the
/// exponent's steps is the bit pattern, for subnormals and carries alike.
template <int kMantissa>
std::uint16_t narrow(double value) {
  constexpr int kExponent = 15 - kMantissa;
  constexpr int kMin = 2 - (1 << (kExponent - 1));  // exponent of the smallest normal number
  constexpr auto kInfinity = std::uint64_t{(1 << kExponent) - 1} << kMantissa;
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 48 & 0x8000);
  std::uint64_t result = kInfinity;
  if (std::isnan(value)) {
    result |= std::uint64_t{1} << (kMantissa - 1);
  } else if (std::isfinite(value)) {
    const int exponent = std::max(static_cast<int>(bits >> 52 & 0x7ff) - 1023, kMin);
    const double scale =
        std::bit_cast<double>(static_cast<std::uint64_t>(1023 - exponent + kMantissa) << 52);
    // Out of range, by far: keeps the scale's exponent field and the shift below in range.
    if (exponent < (1 << (kExponent - 1))) {
      result = static_cast<std::uint64_t>(std::nearbyint(std::fabs(value) * scale)) +
               (static_cast<std::uint64_t>(exponent - kMin) << kMantissa);
      result = std::min(result, kInfinity);
    }
  }
  return static_cast<std::uint16_t>(sign | result);
}

/// Every element type that is read is exact in double, so each value is rounded once.
template <class Read>
void convert(Read read, std::size_t count, Dtype dtype, void* out) {
  for (std::size_t i = 0; i < count; ++i) {
    const double value = read(i);
    switch (dtype) {
      case Dtype::f32: static_cast<float*>(out)[i] = static_cast<float>(value); break;
      case Dtype::bf16: static_cast<std::uint16_t*>(out)[i] = to_bf16(value); break;
      case Dtype::f16: static_cast<std::uint16_t*>(out)[i] = to_f16(value); break;
      case Dtype::e4m3:
      case Dtype::i8: break;  // element_of() has none
    }
  }
}

}  // namespace

std::uint16_t to_f16(double value) { return narrow<10>(value); }

std::uint16_t to_bf16(double value) { return narrow<7>(value); }

float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

float from_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
  const std::uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00)
    return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // A float whose exponent is too small by 112: one exact multiplication also normalises
  // subnormals.
  const auto shifted = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(shifted));
}

Result<FileTensor> as_dtype(const FileTensor& tensor, Dtype dtype) {
  const Element target = element_of(dtype);
  if (tensor.element == target) return tensor;
  if (tensor.element == Element::i32 || tensor.element == Element::i64) {
    return Status::invalid(
        concat("holds ", to_string(tensor.element), "; accepted: f32, f16, bf16, f64"));
  }
  const auto count = static_cast<std::size_t>(tensor.count());
  auto copy = allocate(count * size_of(target));
  if (!copy.ok()) return copy.status();
  void* const out = copy->get();
  const auto* const words = static_cast<const std::uint16_t*>(tensor.data);
  switch (tensor.element) {
    case Element::f16:
      convert([=](std::size_t i) { return from_f16(words[i]); }, count, dtype, out);
      break;
    case Element::bf16:
      convert([=](std::size_t i) { return from_bf16(words[i]); }, count, dtype, out);
      break;
    case Element::f32:
      convert([&](std::size_t i) { return static_cast<const float*>(tensor.data)[i]; }, count,
              dtype, out);
      break;
    default:
      convert([&](std::size_t i) { return static_cast<const double*>(tensor.data)[i]; }, count,
              dtype, out);
  }
  return FileTensor{target, tensor.shape, out, std::move(copy).value()};
}

Result<std::vector<std::int32_t>> as_int32(const FileTensor& tensor) {
  const bool wide = tensor.element == Element::i64;
  if ((!wide && tensor.element != Element::i32) || tensor.shape.size() != 1) {
    return Status::invalid(concat("holds ", to_string(tensor.element), " of shape ",
                                  printable(shape_text(tensor.shape)),
                                  "; accepted: i32 or i64 of one dimension"));
  }
  std::vector<std::int32_t> values(static_cast<std::size_t>(tensor.count()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t value = wide ? static_cast<const std::int64_t*>(tensor.data)[i]
                                    : static_cast<const std::int32_t*>(tensor.data)[i];
    if (value != static_cast<std::int32_t>(value)) {
      return Status::invalid(
          concat("holds ", value, " at index ", i, "; accepted: values that fit int32"));
    }
    values[i] = static_cast<std::int32_t>(value);
  }
  return values;
}

}  // namespace tessera::tools
