// Guarded memory for the checker: every buffer lies between two guard zones and starts out as NaN
// in every storage type, so that a write outside, an element never written and a padding element
// read are all seen; a read outside by AddressSanitizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::tools {

/// 16 bits that are NaN as bf16 and f16, and as f32 when repeated; and 8 bits that are NaN as e4m3.
inline constexpr std::uint16_t kPoison = 0x7FC5;
inline constexpr std::byte kLastPoison = std::byte{0x7F};  ///< where bytes are odd

/// Bytes of a guard zone.
inline constexpr std::size_t kGuard = 256;

/// Bytes between guard zones, poisoned.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  /// `shift` bytes (even) past an address aligned to 64.
  GuardedBuffer(std::size_t bytes, std::size_t shift);

  std::byte* data() const { return start_; }
  std::size_t bytes() const { return bytes_; }
  /// Are both guard zones as they were?
  bool guards_intact() const;
  /// Returns visit(start, bytes) of the memory with both guard zones.
  template <class Visit>
  auto with_guards(const Visit& visit) const {
    forbid_guards(false);
    auto result = visit(start_ - kGuard, bytes_ + 2 * kGuard);
    forbid_guards(true);
    return result;
  }

 private:
  void forbid_guards(bool forbidden) const;

  std::vector<std::byte> storage_;  // moves keep its address
  std::byte* start_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Fills with the poison pattern.
void poison(std::byte* start, std::size_t bytes);

/// Is every byte of the range poison?
bool all_poison(const std::byte* start, std::size_t bytes);

}  // namespace tessera::tools
