// Division by a number that stays the same, without a division: what a GPU takes dozens of
// instructions for.
#pragma once

#include "core/hd.h"

namespace tessera::core {

/// Divides numbers that are not negative; by 0 nothing may be divided. n / d = floor(n m / 2^(31 +
/// l)) for n < 2^31, where l is the least with d <= 2^l and m = ceil(2^(31 + l) / d) < 2^32:
/// rounding m up adds less than n / 2^31 / d to the quotient.
class Divisor {
 public:
  constexpr Divisor() = default;
  /// divisor >= 0.
  TESSERA_HD constexpr explicit Divisor(int divisor) : divisor_(divisor) {
    while ((std::int64_t{1} << (shift_ - 31)) < divisor) ++shift_;
    const std::uint64_t power = std::uint64_t{1} << shift_;
    const auto by = static_cast<std::uint64_t>(max(divisor, 1));
    multiplier_ = static_cast<std::uint32_t>((power + by - 1) / by);
  }

  TESSERA_HD constexpr int value() const { return divisor_; }
  TESSERA_HD constexpr int quotient(int n) const {
    const std::uint64_t product = std::uint64_t{static_cast<std::uint32_t>(n)} * multiplier_;
    return static_cast<int>(product >> shift_);
  }
  TESSERA_HD constexpr std::int64_t quotient(std::int64_t n) const {
    return n >> 31 == 0 ? quotient(static_cast<int>(n)) : n / divisor_;
  }
  TESSERA_HD constexpr int remainder(int n) const { return n - quotient(n) * divisor_; }
  TESSERA_HD constexpr int remainder(std::int64_t n) const {
    return static_cast<int>(n - quotient(n) * divisor_);
  }
  friend constexpr bool operator==(const Divisor&, const Divisor&) = default;

 private:
  int divisor_ = 1;
  int shift_ = 31;
  std::uint32_t multiplier_ = std::uint32_t{1} << 31;
};

/// n >= 0.
TESSERA_HD constexpr int ceil_div(int n, const Divisor& by) {
  return by.quotient(n + by.value() - 1);
}

}  // namespace tessera::core
