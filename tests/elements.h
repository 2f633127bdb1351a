// Memory of any storage type that knows who has written to it: for tests of what reads and writes
// rows of any layout.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/storage.h"

namespace tessera {

/// Elements of any type.
class Elements {
 public:
  Elements() = default;
  /// Every byte says that nobody has written there: as a number, NaN.
  Elements(Dtype dtype, std::int64_t count)
      : dtype_(dtype), bytes_(static_cast<std::size_t>(count * size_of(dtype)), 0xFF) {}

  void* data() { return bytes_.data(); }
  double at(std::int64_t i) const { return reference::load(dtype_, bytes_.data(), i); }
  void set(std::int64_t i, double x) { reference::store(dtype_, bytes_.data(), i, x); }
  std::int64_t count() const { return static_cast<std::int64_t>(bytes_.size()) / size_of(dtype_); }
  bool untouched(std::int64_t i) const {
    for (std::int64_t b = i * size_of(dtype_); b < (i + 1) * size_of(dtype_); ++b) {
      if (bytes_[static_cast<std::size_t>(b)] != 0xFF) return false;
    }
    return true;
  }
  std::int64_t element_bytes() const { return size_of(dtype_); }
  /// Nobody has written there.
  void fill() { std::fill(bytes_.begin(), bytes_.end(), static_cast<unsigned char>(0xFF)); }
  /// Element i becomes another's, of the same type, bit for bit; or is it?
  /// @{
  void copy(std::int64_t i, const Elements& other, std::int64_t at) {
    std::copy_n(other.byte(at), size_of(dtype_), bytes_.begin() + i * size_of(dtype_));
  }
  bool same(std::int64_t i, const Elements& other) const {
    return std::equal(byte(i), byte(i) + size_of(dtype_), other.byte(i));
  }
  /// @}
  friend bool operator==(const Elements&, const Elements&) = default;

 private:
  std::vector<unsigned char>::const_iterator byte(std::int64_t i) const {
    return bytes_.begin() + i * size_of(dtype_);
  }

  Dtype dtype_ = Dtype::f32;
  std::vector<unsigned char> bytes_;
};

}  // namespace tessera
