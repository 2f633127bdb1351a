#include "files/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

namespace tessera::tools {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kPrefix = 8;               // the header length
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::string_view kMetadata = "__metadata__";

struct Type {
  std::string_view name;
  Element element;
};
constexpr std::array kTypes = {
    Type{"F16", Element::f16}, Type{"BF16", Element::bf16}, Type{"F32", Element::f32},
    Type{"F64", Element::f64}, Type{"I32", Element::i32},   Type{"I64", Element::i64},
};

std::string tensor(const Entry& entry) { return "tensor " + in_quotes(entry.name); }

/// Receives the header's JSON piece by piece, so that nothing is built from what the format does
/// not allow: nesting ends at depth 3, and a repeated key is seen. Each event returns false on an
/// error.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  std::vector<Entry> entries;
  Status error;

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return unexpected(printable(text));
  }
  bool binary(binary_t& /*value*/) override { return unexpected("binary"); }
  bool number_integer(number_integer_t value) override {
    return unexpected(std::to_string(value));  // the parser calls this for negative numbers only
  }
  bool number_unsigned(number_unsigned_t value) override {
    constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
    if (place_ != Place::list || value > static_cast<number_unsigned_t>(kMax)) {
      return unexpected(std::to_string(value));
    }
    if (numbers_.size() == kMaxRank) {
      return fail(concat(where(), " has more than ", kMaxRank, " numbers"));
    }
    numbers_.push_back(static_cast<std::int64_t>(value));
    return true;
  }
  bool string(string_t& value) override {
    if (place_ == Place::metadata) return true;
    if (place_ != Place::tensor || field_ != "dtype") return unexpected(in_quotes(value));
    current_.stored_type = value;
    const auto* const known = std::find_if(kTypes.begin(), kTypes.end(),
                                           [&](const Type& type) { return type.name == value; });
    if (known != kTypes.end()) current_.element = known->element;
    return true;
  }

  bool start_object(std::size_t /*size*/) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = current_.name == kMetadata ? Place::metadata : Place::tensor;
    } else {
      return unexpected("an object");
    }
    return true;
  }
  bool key(string_t& value) override {
    if (place_ == Place::top) return begin_tensor(value);
    return place_ == Place::metadata || begin_field(value);
  }
  bool end_object() override {
    if (place_ == Place::tensor && !end_tensor()) return false;
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }
  bool start_array(std::size_t /*size*/) override {
    if (place_ != Place::tensor || field_ == "dtype") return unexpected("an array");
    place_ = Place::list;
    numbers_.clear();
    return true;
  }
  bool end_array() override {
    place_ = Place::tensor;
    if (field_ == "shape") {
      current_.shape = numbers_;
      return true;
    }
    if (numbers_.size() != 2) return fail(where() + " is not a pair [begin, end]");
    // The range as the file gives it; parse_safetensors() turns it into offset and size.
    range_ = {static_cast<std::uint64_t>(numbers_[0]), static_cast<std::uint64_t>(numbers_[1])};
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const Json::exception& reason) override {
    const bool encoding = std::string_view(reason.what()).find("UTF-8") != std::string_view::npos;
    const std::size_t at = position > 0 ? position - 1 : 0;
    const std::size_t from = std::min(at < 12 ? 0 : at - 12, text_.size());
    return fail(concat("header is not valid ", encoding ? "UTF-8" : "JSON", " at byte ",
                       kPrefix + at, ", after ", in_quotes(text_.substr(from, at - from + 1))));
  }

 private:
  enum class Place : std::uint8_t { outside, top, metadata, tensor, list };

  bool begin_tensor(const std::string& name) {
    if (name == kMetadata && std::exchange(has_metadata_, true)) {
      return fail("header has the key '__metadata__' twice");
    }
    current_ = Entry{};
    current_.name = name;
    seen_ = {};
    return true;
  }

  bool begin_field(const std::string& name) {
    const auto* const field = std::find(kFields.begin(), kFields.end(), name);
    if (field == kFields.end()) {
      return fail(concat(tensor(current_), " has the unknown field ", in_quotes(name),
                         "; accepted: dtype, shape, data_offsets"));
    }
    field_ = *field;
    bool& seen = seen_[static_cast<std::size_t>(field - kFields.begin())];
    if (std::exchange(seen, true)) return fail(where() + " is there twice");
    return true;
  }

  bool end_tensor() {
    for (std::size_t i = 0; i < kFields.size(); ++i) {
      if (!seen_[i]) return fail(concat(tensor(current_), " lacks the field ", kFields[i]));
    }
    if (range_.first > range_.second) {
      return fail(concat(tensor(current_), ": data_offsets [", range_.first, ", ", range_.second,
                         "] end before they begin"));
    }
    current_.offset = range_.first;
    current_.bytes = range_.second - range_.first;
    entries.push_back(std::move(current_));
    return true;
  }

  std::string where() const {
    if (place_ == Place::metadata) return "a value of '__metadata__'";
    if (place_ == Place::outside) return "header";
    if (place_ == Place::top) return in_quotes(current_.name);
    std::string text = tensor(current_) + ": " + std::string(field_);
    if (place_ == Place::list) text += "[" + std::to_string(numbers_.size()) + "]";
    return text;
  }

  const char* accepted() const {
    switch (place_) {
      case Place::outside: return "an object";
      case Place::top: return "an object {dtype, shape, data_offsets}";
      case Place::metadata: return "a string";
      case Place::list: return "0 to 9223372036854775807";
      case Place::tensor: break;
    }
    return field_ == "dtype" ? "a string such as 'F32'" : "an array of integers";
  }

  bool unexpected(const std::string& what) {
    return fail(concat(where(), " is ", what, "; accepted: ", accepted()));
  }

  bool fail(std::string text) {
    error = Status::invalid(std::move(text));
    return false;
  }

  static constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};

  std::string_view text_;
  Place place_ = Place::outside;
  bool has_metadata_ = false;
  Entry current_;
  std::string_view field_;
  std::array<bool, kFields.size()> seen_{};
  std::vector<std::int64_t> numbers_;
  std::pair<std::uint64_t, std::uint64_t> range_;
};

Result<std::string_view> locate_header(std::span<const std::byte> bytes) {
  if (bytes.size() < kPrefix) {
    return Status::invalid(concat("is truncated: ", bytes.size(), " bytes, a .safetensors file ",
                                  "begins with 8 bytes of header length"));
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kPrefix; ++i) {
    length |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  if (length > kMaxHeader) {
    return Status::invalid(
        concat("header length at byte 0 is ", length, "; accepted: up to ", kMaxHeader));
  }
  if (length > bytes.size() - kPrefix) {
    return Status::invalid(concat("is truncated: header length at byte 0 is ", length, ", but ",
                                  bytes.size() - kPrefix, " bytes follow"));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kPrefix, length);
  if (!text.starts_with('{')) {
    return Status::invalid("header at byte 8 does not begin with '{'");
  }
  // The JSON parser takes a zero byte for the end of its input.
  if (const auto zero = text.find('\0'); zero != std::string_view::npos) {
    return Status::invalid(concat("header is not valid JSON: byte ", kPrefix + zero, " is zero"));
  }
  return text;
}

/// Each tensor has the size that its shape says; together they cover the data exactly. Sorts by
/// offset.
Status check_layout(std::vector<Entry>& entries, std::uint64_t present) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  std::uint64_t covered = 0;
  for (const Entry& entry : entries) {
    const std::uint64_t end = entry.offset + entry.bytes;  // both below 2^63
    const std::string range =
        concat(tensor(entry), ": data_offsets [", entry.offset, ", ", end, "]");
    if (end > present) {
      return Status::invalid(concat(range, " exceed the ", present, " data bytes that are there",
                                    " (is the file truncated?)"));
    }
    if (entry.element) {
      const auto needed = byte_count(entry.shape, *entry.element);
      const std::string shape = printable(shape_text(entry.shape)) + " of " + entry.stored_type;
      if (!needed) {
        return Status::invalid(
            concat(tensor(entry), ": shape ", shape, " overflows: over 2^63 bytes"));
      }
      if (*needed != entry.bytes) {
        return Status::invalid(
            concat(range, " hold ", entry.bytes, " bytes, but shape ", shape, " needs ", *needed));
      }
    }
    if (entry.offset != covered) {
      return Status::invalid(concat(range,
                                    entry.offset < covered ? " overlap" : " leave a hole after",
                                    " the tensors before, which end at ", covered));
    }
    covered = end;
  }
  if (covered != present) {
    return Status::invalid(concat("is too long: the tensors end at data byte ", covered, ", but ",
                                  present, " data bytes are there"));
  }
  return {};
}

Status check_distinct(std::span<const Entry> entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const Entry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return {};
  return Status::invalid(concat("tensor ", in_quotes(*twice), " is there twice"));
}

Result<std::vector<Entry>> parse(std::span<const std::byte> bytes) {
  const auto header = locate_header(bytes);
  if (!header.ok()) return header.status();
  const std::string_view text = header.value();
  HeaderReader reader(text);
  if (!Json::sax_parse(text.begin(), text.end(), &reader)) return reader.error;
  const std::uint64_t data = kPrefix + text.size();
  if (Status status = check_distinct(reader.entries); !status.ok()) return status;
  if (Status status = check_layout(reader.entries, bytes.size() - data); !status.ok())
    return status;
  for (Entry& entry : reader.entries) entry.offset += data;
  return std::move(reader.entries);
}

}  // namespace

Result<std::vector<Entry>> parse_safetensors(std::span<const std::byte> bytes) {
  try {
    return parse(bytes);
  } catch (const std::bad_alloc&) {
    return Status::device("header does not fit into memory");
  } catch (const std::exception& error) {
    return Status::invalid("header cannot be read: " + printable(error.what()));
  }
}

Result<std::string> safetensors_header(std::span<const Entry> entries) {
  if (Status status = check_distinct(entries); !status.ok()) return status;
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::uint64_t offset = 0;
  for (const Entry& entry : entries) {
    if (entry.name == kMetadata) {
      return Status::invalid("a tensor cannot be named '__metadata__': the format keeps that name");
    }
    const auto* const type = std::find_if(
        kTypes.begin(), kTypes.end(), [&](const Type& t) { return t.element == entry.element; });
    if (type == kTypes.end()) return Status::invalid(tensor(entry) + " has no element type");
    header[entry.name] = {{"dtype", type->name},
                          {"shape", entry.shape},
                          {"data_offsets", {offset, offset + entry.bytes}}};
    offset += entry.bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    return Status::invalid("a tensor's name is not valid UTF-8");
  }
  // Spaces after the JSON let the data begin at a multiple of 64.
  constexpr std::size_t kAlign = 64;
  text.resize((kPrefix + text.size() + kAlign - 1) / kAlign * kAlign - kPrefix, ' ');
  if (text.size() > kMaxHeader) {
    return Status::invalid("the tensors' names exceed the format's header");
  }
  std::string prefix(kPrefix, '\0');
  for (std::size_t i = 0; i < kPrefix; ++i) {
    prefix[i] = static_cast<char>(text.size() >> (8 * i) & 255);
  }
  return prefix + text;
}

}  // namespace tessera::tools
