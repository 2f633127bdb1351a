#include "files/npy.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

namespace tessera::tools {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeader = 1 << 20;  // ordinary arrays need 128 bytes

struct Descr {
  std::string_view text;
  Element element;
};

// What is written comes first for each element.
constexpr std::array kDescrs = {
    Descr{"<f2", Element::f16}, Descr{"<V2", Element::bf16}, Descr{"bfloat16", Element::bf16},
    Descr{"<f4", Element::f32}, Descr{"<f8", Element::f64},  Descr{"<i4", Element::i32},
    Descr{"<i8", Element::i64},
};

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Reads the header's dictionary. Each step returns false after it has set `error`.
class HeaderReader {
 public:
  /// `base` is the header's first byte in the file, for messages.
  HeaderReader(std::string_view text, std::size_t base) : text_(text), base_(base) {}

  bool read() {
    if (!expect('{', "a dictionary")) return false;
    while (!next_is('}')) {
      if (!read_item()) return false;
      if (!next_is(',')) break;
      ++at_;
    }
    if (!expect('}', "',' or '}'")) return false;
    skip_space();
    if (at_ < text_.size()) return fail("spaces up to the end of the header");
    if (!descr) return missing("descr");
    if (!fortran_order) return missing("fortran_order");
    if (!shape) return missing("shape");
    return true;
  }

  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;
  Status error;

 private:
  bool read_item() {
    std::string key;
    if (!read_string(key)) return false;
    const bool known = key == "descr" || key == "fortran_order" || key == "shape";
    const bool repeated = (key == "descr" && descr) || (key == "fortran_order" && fortran_order) ||
                          (key == "shape" && shape);
    if (!known || repeated) {
      error = Status::invalid(concat("header has ", known ? "twice the key " : "the unknown key ",
                                     in_quotes(key), "; accepted: descr, fortran_order, shape"));
      return false;
    }
    if (!expect(':', "':'")) return false;
    if (key == "descr") return read_descr();
    return key == "shape" ? read_shape() : read_bool();
  }

  bool read_descr() {
    if (next_is('[')) {
      error = Status::unsupported(
          "descr is a list (a structured array); a plain array of <f4, <f2, <f8, <i4 or <i8 is "
          "accepted");
      return false;
    }
    return read_string(descr.emplace());
  }

  bool read_bool() {
    skip_space();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (!text_.substr(at_).starts_with(word)) continue;
      at_ += word.size();
      fortran_order = value;
      return true;
    }
    return fail("True or False for fortran_order");
  }

  bool read_shape() {
    if (!expect('(', "a tuple such as (2, 3) for shape")) return false;
    shape.emplace();
    bool comma = true;
    while (!next_is(')')) {
      if (!comma) return fail("',' or ')'");
      if (shape->size() == kMaxRank) {
        error = Status::unsupported(concat("shape has more than ", kMaxRank, " dimensions"));
        return false;
      }
      if (!read_size()) return false;
      comma = next_is(',');
      if (comma) ++at_;
    }
    if (shape->size() == 1 && !comma) return fail("',' (a tuple of one is written (n,))");
    ++at_;
    return true;
  }

  bool read_size() {
    const std::size_t begin = at_;
    if (next_is('-')) ++at_;
    std::int64_t value = 0;
    bool overflow = false;
    const std::size_t digits = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      const std::int64_t digit = text_[at_] - '0';
      overflow |= value > (std::numeric_limits<std::int64_t>::max() - digit) / 10;
      if (!overflow) value = value * 10 + digit;
    }
    if (at_ == digits) return fail("a whole number");
    if (overflow || digits != begin) {
      error = Status::invalid(concat("shape[", shape->size(), "] is ",
                                     printable(text_.substr(begin, at_ - begin)),
                                     "; accepted: 0 to 9223372036854775807"));
      return false;
    }
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote long integers so
    shape->push_back(value);
    return true;
  }

  /// Escapes are refused: no accepted word needs one.
  bool read_string(std::string& out) {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"') return fail("a quoted string");
    const std::size_t end = text_.find(quote, at_ + 1);
    const std::size_t escape = text_.find('\\', at_ + 1);
    if (end == std::string_view::npos) return fail("a string with a closing quote");
    if (escape < end) return fail("a string without escapes");
    out = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return true;
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool next_is(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool expect(char c, const char* what) {
    if (!next_is(c)) return fail(what);
    ++at_;
    return true;
  }
  bool fail(const char* expected) {
    const std::string found = at_ < text_.size() ? in_quotes(text_.substr(at_, 12))
                                                 : std::string("the end of the header");
    error = Status::invalid(concat("header is malformed at byte ", base_ + at_, ": found ", found,
                                   ", expected ", expected));
    return false;
  }
  bool missing(const char* key) {
    error = Status::invalid(concat("header lacks the key '", key, "'"));
    return false;
  }

  std::string_view text_;
  std::size_t base_;
  std::size_t at_ = 0;
};

Result<Element> element_of(std::string_view descr, TwoBytes two_bytes) {
  const bool unnamed = descr == "<V2" || descr == "|V2" || descr == "<u2";
  if (unnamed && two_bytes == TwoBytes::bf16) return Element::bf16;
  if (unnamed) {
    return Status::unsupported(concat(
        "descr ", in_quotes(descr), " does not say what its two bytes ", "mean (NumPy has no bf16)",
        two_bytes == TwoBytes::offer ? "; if they are bf16, say so with --u2-is-bf16"
                                     : "; accepted when read as bf16"));
  }
  for (const Descr& known : kDescrs) {
    if (descr == known.text) return known.element;
  }
  if (descr.starts_with('>')) {
    return Status::unsupported(
        concat("descr ", in_quotes(descr), " is big-endian; little-endian is ",
               "accepted: np.save(path, a.astype('<", printable(descr.substr(1)), "'))"));
  }
  const bool objects = descr.find('O') != std::string_view::npos;
  return Status::unsupported(concat("descr ", in_quotes(descr), objects ? " (Python objects)" : "",
                                    " is not read; accepted: <f4, <f2, <f8, <i4, <i8, and bf16 ",
                                    "as <V2"));
}

/// Checks magic, version and length; returns {first byte of the dictionary, its length}.
Result<std::pair<std::size_t, std::size_t>> locate_header(std::span<const std::byte> bytes) {
  if (!is_npy(bytes)) return Status::invalid("is not a .npy file: byte 0 is not \\x93NUMPY");
  const auto at = [&](std::size_t i) { return std::to_integer<std::size_t>(bytes[i]); };
  if (bytes.size() < 8) return Status::invalid("is truncated: the version at byte 6 is missing");
  const std::size_t major = at(6);
  if (major < 1 || major > 3 || at(7) != 0) {
    return Status::unsupported(
        concat("has .npy version ", major, ".", at(7), " at byte 6; accepted: 1.0, 2.0, 3.0"));
  }
  const std::size_t begin = major == 1 ? 10 : 12;
  if (bytes.size() < begin) {
    return Status::invalid(concat("is truncated: ", bytes.size(), " bytes, the header length at ",
                                  "byte 8 is incomplete"));
  }
  const std::size_t low = at(8) | at(9) << 8;
  const std::size_t length = major == 1 ? low : low | at(10) << 16 | at(11) << 24;
  if (length > kMaxHeader) {
    return Status::unsupported(
        concat("header length at byte 8 is ", length, "; accepted: up to ", kMaxHeader));
  }
  if (length > bytes.size() - begin) {
    return Status::invalid(concat("is truncated: header length at byte 8 is ", length, ", but ",
                                  bytes.size() - begin, " bytes follow"));
  }
  return std::pair(begin, length);
}

}  // namespace

bool is_npy(std::span<const std::byte> bytes) { return text_of(bytes).starts_with(kMagic); }

Result<Entry> parse_npy(std::span<const std::byte> bytes, TwoBytes two_bytes) {
  const auto header = locate_header(bytes);
  if (!header.ok()) return header.status();
  const auto [begin, length] = header.value();
  HeaderReader reader(text_of(bytes.subspan(begin, length)), begin);
  if (!reader.read()) return reader.error;
  const auto element = element_of(*reader.descr, two_bytes);
  if (!element.ok()) return element.status();
  if (*reader.fortran_order) {
    return Status::unsupported(
        "fortran_order is True (column-major); row-major is accepted: np.save(path, "
        "np.ascontiguousarray(a))");
  }
  Entry entry;
  entry.stored_type = *reader.descr;
  entry.element = element.value();
  entry.shape = *reader.shape;
  entry.offset = begin + length;
  const auto needed = byte_count(entry.shape, element.value());
  if (!needed) {
    return Status::invalid(
        concat("shape ", printable(shape_text(entry.shape)), " overflows: over 2^63 bytes"));
  }
  entry.bytes = *needed;
  const std::uint64_t present = bytes.size() - entry.offset;
  if (present != entry.bytes) {
    return Status::invalid(
        concat(present < entry.bytes ? "is truncated: shape " : "is too long: shape ",
               printable(shape_text(entry.shape)), " of ", to_string(element.value()), " needs ",
               entry.bytes, " bytes from byte ", entry.offset, " on, but ", present, " are there"));
  }
  return entry;
}

std::string npy_header(Element element, std::span<const std::int64_t> shape) {
  const auto* const known = std::find_if(kDescrs.begin(), kDescrs.end(),
                                         [&](const Descr& d) { return d.element == element; });
  std::string dictionary = concat("{'descr': '", known->text, "', 'fortran_order': False, ",
                                  "'shape': ", shape_text(shape), ", }");
  constexpr std::size_t kPrefix = 10;
  constexpr std::size_t kAlign = 64;
  const std::size_t total = (kPrefix + dictionary.size() + 1 + kAlign - 1) / kAlign * kAlign;
  dictionary.resize(total - kPrefix - 1, ' ');
  dictionary += '\n';
  // At most 64 dimensions of 19 digits: the length always fits version 1.0's two bytes.
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(dictionary.size() & 255),
             static_cast<char>(dictionary.size() >> 8)};
  return header + dictionary;
}

}  // namespace tessera::tools
