// Division without a division, against the machine's.
#include "core/divisor.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace tessera::core {
namespace {

constexpr int kMost = 0x7FFFFFFF;

void check(int divisor, std::int64_t n) {
  const Divisor by(divisor);
  ASSERT_EQ(by.quotient(n), n / divisor) << n << " / " << divisor;
  ASSERT_EQ(by.remainder(n), n % divisor) << n << " / " << divisor;
  if (n > kMost) return;
  ASSERT_EQ(by.quotient(static_cast<int>(n)), n / divisor) << n << " / " << divisor;
  ASSERT_EQ(by.remainder(static_cast<int>(n)), n % divisor) << n << " / " << divisor;
  if (n > kMost - divisor) return;
  ASSERT_EQ(ceil_div(static_cast<int>(n), by), (n + divisor - 1) / divisor)
      << n << " / " << divisor;
}

TEST(Divisor, SmallOnesOfAllSmallNumbers) {
  for (int divisor = 1; divisor <= 300; ++divisor) {
    for (int n = 0; n <= 1000; ++n) check(divisor, n);
    for (int n = kMost - 1000; n < kMost; ++n) check(divisor, n);
    check(divisor, kMost);
  }
}

// Around multiples, where a quotient that is off by one shows, and beyond 31 bits.
TEST(Divisor, AnyOfAny) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  for (int trial = 0; trial < 200000; ++trial) {
    const int bits = 1 + static_cast<int>(below(31));
    const int divisor = 1 + static_cast<int>(below((std::uint64_t{1} << bits) - 1));
    const std::int64_t multiple = below(static_cast<std::uint64_t>(kMost / divisor) + 1) * divisor;
    for (const std::int64_t n : {multiple, multiple - 1, multiple + divisor - 1}) {
      if (n >= 0) check(divisor, n);
    }
    check(divisor, below(std::uint64_t{1} << 62));
  }
}

TEST(Divisor, ItsNumberIsKeptEvenIf0) {
  EXPECT_EQ(Divisor(0).value(), 0);
  EXPECT_EQ(Divisor(kMost).value(), kMost);
  EXPECT_EQ(Divisor().quotient(7), 7);
}

}  // namespace
}  // namespace tessera::core
