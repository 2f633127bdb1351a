// Feeds arbitrary bytes to the parsers of tensor files. What they accept must keep their promises:
// the ranges lie within the file, have the size of their shape, and a header written from them
// parses back. Files are also built around the input, so that the fuzzer need not guess lengths and
// data sizes.
#include <fuzzer/FuzzedDataProvider.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/entry.h"
#include "files/npy.h"
#include "files/safetensors.h"
#include "files/tensor_file.h"

namespace {

using namespace tessera;         // NOLINT(google-build-using-namespace)
using namespace tessera::tools;  // NOLINT(google-build-using-namespace)

void require(bool condition) {
  if (!condition) std::abort();
}

void require_one_line(const Status& status) {
  require(!status.ok() && !status.text.empty() && status.text.size() < 2000);
  for (const char c : status.text) require(c >= 0x20 && c < 0x7f);
}

void require_sound(const Entry& entry, std::span<const std::byte> file) {
  require(entry.shape.size() <= kMaxRank);
  require(entry.offset <= file.size() && entry.bytes <= file.size() - entry.offset);
  if (entry.element) require(byte_count(entry.shape, *entry.element) == entry.bytes);
}

std::vector<std::byte> with_data(const std::string& header, std::uint64_t size) {
  std::vector<std::byte> file(header.size() + size);
  if (!header.empty()) std::memcpy(file.data(), header.data(), header.size());
  return file;
}

void check_npy(std::span<const std::byte> file) {
  for (const TwoBytes two_bytes : {TwoBytes::refuse, TwoBytes::bf16}) {
    const auto entry = parse_npy(file, two_bytes);
    if (!entry.ok()) {
      require_one_line(entry.status());
      continue;
    }
    require_sound(*entry, file);
    const auto again = with_data(npy_header(*entry->element, entry->shape), entry->bytes);
    const auto parsed = parse_npy(again, TwoBytes::bf16);
    require(parsed.ok() && parsed->shape == entry->shape && parsed->element == entry->element);
  }
}

void check_safetensors(std::span<const std::byte> file) {
  const auto entries = parse_safetensors(file);
  if (!entries.ok()) return require_one_line(entries.status());
  std::uint64_t size = 0;
  for (const Entry& entry : *entries) {
    require_sound(entry, file);
    if (!entry.element) return;  // not written
    size += entry.bytes;
  }
  const auto header = safetensors_header(*entries);
  require(header.ok());
  const auto again = parse_safetensors(with_data(*header, size));
  require(again.ok() && again->size() == entries->size());
}

std::string npy_file(const std::string& header) {
  std::string prefix = "\x93NUMPY";
  prefix += {'\1', '\0', static_cast<char>(header.size() & 255),
             static_cast<char>(header.size() >> 8 & 255)};
  return prefix + header;
}

std::string safetensors_file(const std::string& header) {
  std::string prefix(8, '\0');
  for (std::size_t i = 0; i < 3; ++i) prefix[i] = static_cast<char>(header.size() >> (8 * i) & 255);
  return prefix + header;
}

/// Writes files whose parts are mostly right, and now and then whatever the input says.
class Builder {
 public:
  explicit Builder(std::span<const std::uint8_t> input) : input_(input.data(), input.size()) {}

  std::vector<std::byte> npy() {
    static constexpr std::array kTypes = {"<f4", "<f2", "<f8", "<i4", "<i8", "<V2", "|V2", ">f4"};
    const std::string descr = input_.PickValueInArray(kTypes);
    const std::string shape = numbers(static_cast<std::uint64_t>(descr.back() - '0'));
    std::vector<std::string> items = {"'descr': " + odd_or("'" + descr + "'"),
                                      "'fortran_order': " + odd_or("False"),
                                      "'shape': " + odd_or("(" + shape + ",)")};
    std::swap(items[0], items[input_.ConsumeIntegralInRange<std::size_t>(0, 2)]);
    const std::string header = "{" + items[0] + odd_or(", ") + items[1] + ", " + items[2] + "}\n";
    return finish(npy_file(header), bytes_);
  }

  std::vector<std::byte> safetensors() {
    std::string header = "{";
    std::uint64_t offset = 0;
    const int count = input_.ConsumeIntegralInRange(0, 5);
    for (int i = 0; i < count; ++i) {
      header += (i == 0 ? "\"" : ",\"") + odd_or(std::to_string(i)) + "\":" + tensor(offset);
      offset += odd() ? bytes_ + 1 : bytes_;
    }
    return finish(safetensors_file(header + odd_or("}")), offset);
  }

 private:
  /// One tensor's fields; leaves its size in bytes_.
  std::string tensor(std::uint64_t offset) {
    static constexpr std::array kTypes = {"F16", "BF16", "F32", "F64", "I32", "I64", "U8"};
    const std::string type = input_.PickValueInArray(kTypes);
    const std::string bits = type.substr(type.find_first_of("12368"));
    const std::string shape = numbers(std::stoull(bits) / 8);
    return "{\"dtype\":" + odd_or("\"" + type + "\"") + ",\"shape\":" + odd_or("[" + shape + "]") +
           ",\"data_offsets\":[" + odd_or(std::to_string(offset)) + "," +
           odd_or(std::to_string(offset + bytes_)) + "]}";
  }

  /// Up to four comma-separated sizes; bytes_ becomes their product times `item`.
  std::string numbers(std::uint64_t item) {
    std::string text;
    bytes_ = item;
    for (int rank = input_.ConsumeIntegralInRange(1, 4); rank > 0; --rank) {
      const auto size = input_.ConsumeIntegralInRange<std::uint64_t>(0, 4);
      bytes_ *= size;
      text += (text.empty() ? "" : ",") + odd_or(std::to_string(size));
    }
    return text;
  }

  bool odd() { return input_.ConsumeIntegral<std::uint8_t>() > 250; }
  std::string odd_or(const std::string& right) {
    return odd() ? input_.ConsumeRandomLengthString(64) : right;
  }
  std::vector<std::byte> finish(const std::string& header, std::uint64_t size) {
    auto file = with_data(header, odd() ? input_.ConsumeIntegral<std::uint16_t>() : size);
    if (odd()) {
      const auto at = input_.ConsumeIntegralInRange<std::size_t>(0, file.size() - 1);
      file[at] = static_cast<std::byte>(input_.ConsumeIntegral<std::uint8_t>());
    }
    return file;
  }

  FuzzedDataProvider input_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span input(data, size);
  const std::string text(input.begin(), input.end());
  check_npy(std::as_bytes(input));
  check_safetensors(std::as_bytes(input));
  check_npy(with_data(npy_file(text), 0));
  check_safetensors(with_data(safetensors_file(text), 0));
  check_npy(Builder(input).npy());
  check_safetensors(Builder(input).safetensors());

  const TensorAddress address = TensorAddress::parse(text);
  require(address.path.size() + address.name.size() <= size);
  return 0;
}
