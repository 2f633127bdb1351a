// S8: the generator is Philox4x32-10 (known answers published with Random123), the mask depends on
// every coordinate, keeps the asked fraction, and scales so that the expectation is unchanged.
#include "core/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>

namespace tessera::core {
namespace {

TEST(Philox, KnownAnswers) {
  const struct {
    Philox4<std::uint32_t> counter;
    std::uint32_t key0, key1;
    Philox4<std::uint32_t> expected;
  } cases[] = {
      {{{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       0xffffffff,
       0xffffffff,
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0xa4093822,
       0x299f31d0,
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const auto& c : cases) {
    const auto words = philox4x32_10<std::uint32_t>(c.counter, c.key0, c.key1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words.word[i], c.expected.word[i]);
  }
}

TEST(Dropout, KeepsTheAskedFractionAndTheExpectation_S8) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (const float p : {0.001F, 0.1F, 0.5F, 0.9F}) {
    const Dropout dropout = make_dropout(p, seed, 7);
    constexpr int kQueries = 64, kKeys = 1024;
    int kept = 0;
    for (int i = 0; i < kQueries; ++i) {
      for (int j = 0; j < kKeys; ++j) kept += dropout_keeps(dropout, 1, 2, i, j) ? 1 : 0;
    }
    constexpr double kDraws = double{kQueries} * kKeys;
    const double deviation = std::sqrt(p * (1.0 - p) / kDraws);
    EXPECT_NEAR(kept / kDraws, 1.0 - p, 6.0 * deviation + 1.0 / 65536.0) << "p " << p;
    EXPECT_NEAR(dropout.keep_scale * (1.0 - dropout.threshold / 65536.0), 1.0, 1e-6);
  }
}

TEST(Dropout, ZeroMeansOff) {
  EXPECT_FALSE(make_dropout(0.0F, 1, 2).active());
  EXPECT_EQ(make_dropout(0.0F, 1, 2).keep_scale, 1.0F);
}

TEST(Dropout, AKeyHasItsOwnHalfOfAWord_S8) {
  // Halves that say their own number: of key 2 w the low one of word w, of key 2 w + 1 the high
  // one.
  const Philox4<std::uint32_t> bits{{0x10000, 0x30002, 0x50004, 0x70006}};
  const Dropout dropout{0, 0, 4, 2.0F};
  for (const int octet : {0, 1, 12345678}) {
    for (int i = 0; i < kPhiloxKeys; ++i) {
      const int key = kPhiloxKeys * octet + i;
      EXPECT_EQ(dropout_octet(key), octet);
      EXPECT_EQ(dropout_half(bits.word[dropout_word(key)], key), static_cast<unsigned>(i));
      EXPECT_EQ(dropout_keeps(dropout, bits, key), i >= 4) << "kept from the threshold on";
    }
  }
}

TEST(Dropout, EveryCoordinateMatters_S8) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const auto draw = [](std::uint64_t s, std::uint64_t offset, int batch, int head, int query,
                       int first_key) {
    const Dropout dropout = make_dropout(0.5F, s, offset);
    std::uint64_t mask = 0;
    for (int j = 0; j < 64; ++j) {
      mask = mask << 1 | (dropout_keeps(dropout, batch, head, query, first_key + j) ? 1U : 0U);
    }
    return mask;
  };
  const std::uint64_t base = draw(seed, 3, 1, 2, 5, 0);
  EXPECT_EQ(base, draw(seed, 3, 1, 2, 5, 0));
  EXPECT_NE(base, draw(seed + 1, 3, 1, 2, 5, 0));
  EXPECT_NE(base, draw(seed, 4, 1, 2, 5, 0));
  EXPECT_NE(base, draw(seed, 3, 0, 2, 5, 0));
  EXPECT_NE(base, draw(seed, 3, 1, 3, 5, 0));
  EXPECT_NE(base, draw(seed, 3, 1, 2, 6, 0));
  EXPECT_NE(base, draw(seed, 3, 1, 2, 5, 64));
}

}  // namespace
}  // namespace tessera::core
