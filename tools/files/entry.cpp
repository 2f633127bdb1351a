#include "files/entry.h"

#include <bit>
#include <limits>

namespace tessera::tools {

static_assert(std::endian::native == std::endian::little, "tensor files are mapped, not swapped");

const char* to_string(Element element) {
  switch (element) {
    case Element::f16: return "f16";
    case Element::bf16: return "bf16";
    case Element::f32: return "f32";
    case Element::f64: return "f64";
    case Element::i32: return "i32";
    case Element::i64: return "i64";
  }
  return "unknown";
}

std::optional<std::uint64_t> byte_count(std::span<const std::int64_t> shape, Element element) {
  constexpr auto kLimit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t product = size_of(element);
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
      continue;
    }
    if (static_cast<std::uint64_t>(size) > kLimit / product) return std::nullopt;
    product *= static_cast<std::uint64_t>(size);
  }
  return empty ? 0 : product;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  if (shape.size() == 1) text += ",";
  return text + ")";
}

std::string printable(std::string_view text, std::size_t limit) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string safe;
  for (const char c : text.substr(0, limit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      safe += c;
    } else {
      safe += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (text.size() > limit) safe += "...";
  return safe;
}

std::string in_quotes(std::string_view text) { return "'" + printable(text) + "'"; }

}  // namespace tessera::tools
