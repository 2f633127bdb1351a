// The steps of quantising one by one: casts of every kind of number, scales at the ends of fp32,
// pieces of rows.
#include "core/quantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "reference/storage.h"

namespace tessera {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::uint32_t stored(Dtype dtype, float x) {
  std::uint8_t byte = 0;
  reference::store(dtype, &byte, 0, static_cast<double>(x));
  return byte;
}

static_assert(core::to_e4m3(0.0F) == 0x00 && core::to_e4m3(-0.0F) == 0x80);
static_assert(core::to_e4m3(1.0F) == 0x38 && core::to_e4m3(-448.0F) == 0xFE);
static_assert(core::to_e4m3(1e9F) == 0x7E && core::to_i8(-1e9F) == 0x81);
static_assert(core::to_i8(2.5F) == 2 && core::to_i8(3.5F) == 4 && core::to_i8(-2.5F) == 0xFE);

// Every e4m3, what lies in the middle of two, and the fp32 beside those; then any bits.
TEST(QuantizeCast, IsTheNearest_S14) {
  std::vector<float> numbers = {kInf, -kInf, 448.0F, 464.0F, 127.5F, -127.5F, 128.0F, 1e-45F};
  for (int byte = 0; byte < 0x7E; ++byte) {
    const auto low = static_cast<std::uint8_t>(byte), high = static_cast<std::uint8_t>(byte + 1);
    const auto a = static_cast<float>(reference::load(Dtype::e4m3, &low, 0));
    const auto b = static_cast<float>(reference::load(Dtype::e4m3, &high, 0));
    const float middle = 0.5F * (a + b);
    for (const float x : {a, middle, std::nextafter(middle, 0.0F), std::nextafter(middle, kInf)}) {
      numbers.push_back(x);
      numbers.push_back(-x);
    }
  }
  for (int i = -130; i <= 130; ++i) numbers.push_back(static_cast<float>(i) + 0.5F);
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    numbers.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  for (const float x : numbers) {
    if (std::isnan(x)) {
      ASSERT_EQ(core::to_e4m3(x), 0x7FU);
      ASSERT_EQ(core::to_i8(x), 0U);
      continue;
    }
    ASSERT_EQ(core::to_e4m3(x), stored(Dtype::e4m3, x)) << x;
    ASSERT_EQ(core::to_i8(x), stored(Dtype::i8, x)) << x;
  }
}

TEST(QuantizeScale, IsNeverInfiniteNorSubnormal_S14) {
  using Written = core::WrittenScale<float>;
  for (const float limit : {448.0F, 127.0F}) {
    const Written none = Written::of(0.0F, limit);
    EXPECT_EQ(none.scale, 1.0F);
    EXPECT_EQ(none.factor, 1.0F);
    const float large = std::numeric_limits<float>::max();
    for (const float amax : {1e-45F, 1e-38F, 1e-36F, 0x1p-100F, 1e-20F, 1.0F, 3.0F, large, kInf}) {
      const Written scale = Written::of(amax, limit);
      EXPECT_TRUE(std::isnormal(scale.scale)) << amax;
      EXPECT_TRUE(std::isnormal(scale.factor)) << amax;
      const float counted = std::fmin(std::fmax(amax, 0x1p-100F), large);
      EXPECT_EQ(scale.scale, counted / limit) << amax;
      EXPECT_EQ(scale.factor, limit / counted) << amax;
      // The largest number becomes the largest element.
      if (amax >= 0x1p-100F) {
        EXPECT_EQ(core::to_e4m3(amax * Written::of(amax, 448.0F).factor), 0x7EU) << amax;
        EXPECT_EQ(core::to_i8(amax * Written::of(amax, 127.0F).factor), 127U) << amax;
      }
    }
  }
}

TEST(QuantizeHadamard, FactorsAreTheNearest_S14) {
  for (int n = 1; n <= core::kMostHadamard; n *= 2) {
    EXPECT_EQ(core::hadamard_factor(n), static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))))
        << n;
  }
}

// Pieces cover every row of every sequence once, in any order of lengths.
TEST(QuantizePieces, CoverEveryRowOnce) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 500; ++trial) {
    const int batch = 1 + static_cast<int>(random() % 5), longest = static_cast<int>(random() % 40);
    const int rows = 1 + static_cast<int>(random() % 12);
    std::vector<std::int32_t> cu = {0};
    for (int b = 0; b < batch; ++b) {
      cu.push_back(cu.back() +
                   static_cast<std::int32_t>(random() % (static_cast<unsigned>(longest) + 1)));
    }
    for (const bool packed : {false, true}) {
      const core::RowPieces pieces(packed ? cu.data() : nullptr, longest, batch, rows);
      std::set<std::pair<int, int>> seen;
      for (std::int64_t i = 0; i < pieces.count(cu.back()); ++i) {
        const core::RowRange range = pieces.of(i);
        ASSERT_LE(range.end - range.begin, rows);
        ASSERT_TRUE(range.begin == range.end || range.begin % rows == 0);
        for (int row = range.begin; row < range.end; ++row) {
          ASSERT_TRUE(seen.insert({range.batch, row}).second) << "row " << row << " twice";
        }
      }
      ASSERT_EQ(std::ssize(seen), packed ? cu.back() : batch * longest);
      for (const auto& [b, row] : seen) {
        const auto i = static_cast<std::size_t>(b);
        ASSERT_LT(row, packed ? cu[i + 1] - cu[i] : longest);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
