// Entry: what a tensor file says about one tensor, before any of its data is touched. The parsers
// (npy.h, safetensors.h) fill entries from untrusted bytes and promise of each one: its byte range
// lies within the file, and is exactly as long as its shape and element type say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// Element types that are read and written. Files are little-endian, and so is the host.
enum class Element : std::uint8_t { f16, bf16, f32, f64, i32, i64 };

/// Bytes of one element.
constexpr std::uint64_t size_of(Element element) {
  switch (element) {
    case Element::f16:
    case Element::bf16: return 2;
    case Element::f32:
    case Element::i32: return 4;
    case Element::f64:
    case Element::i64: return 8;
  }
  return 0;
}

/// "f32"; the name used in messages.
const char* to_string(Element element);

/// NumPy's own limit; also keeps hostile shapes from growing without end.
inline constexpr std::size_t kMaxRank = 64;

struct Entry {
  std::string name;                ///< empty for .npy, which has none
  std::string stored_type;         ///< the file's own word: "<f4", "BF16"
  std::optional<Element> element;  ///< none: a type that is not read
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  ///< first byte, counted from the start of the file
  std::uint64_t bytes = 0;
};

/// Bytes of a dense tensor; none if it, with zero-sized dimensions left out, exceeds 2^63 - 1.
std::optional<std::uint64_t> byte_count(std::span<const std::int64_t> shape, Element element);

/// "(2, 3)".
std::string shape_text(std::span<const std::int64_t> shape);

/// Untrusted text made safe for a one-line message: control and non-ASCII bytes as \xNN, cut at
/// `limit`.
std::string printable(std::string_view text, std::size_t limit = 80);

/// printable() within single quotes.
std::string in_quotes(std::string_view text);

/// The arguments streamed one after the other.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream stream;
  (stream << ... << args);
  return std::move(stream).str();
}

}  // namespace tessera::tools
