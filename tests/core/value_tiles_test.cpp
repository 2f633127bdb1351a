// Values of 8 bits in tiles (S14): every element has a place of its own, and what reads them meets
// no bank twice.
#include "core/value_tiles.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <vector>

namespace tessera::core {
namespace {

TEST(ValueTiles, EveryElementHasAPlaceOfItsOwn_S14) {
  for (const int columns : {64, 96, 128, 192, 256}) {
    const ValueTiles tiles = {columns};
    std::vector<bool> taken(static_cast<std::size_t>(2 * tiles.tile_bytes()));
    for (int key = 0; key < 2 * ValueTiles::kKeys; ++key) {
      for (int column = 0; column < tiles.rows(); ++column) {
        const auto at = static_cast<std::size_t>(tiles.offset(key, column));
        ASSERT_LT(at, taken.size());
        ASSERT_FALSE(taken[at]) << key << ", " << column;
        taken[at] = true;
      }
    }
    EXPECT_EQ(tiles.panel_bytes() % 256, 0) << "a panel must begin where the swizzle does";
  }
}

/// A thread's weights of 16 keys are those of keys 2j, 2j + 1, 2j + 8 and 2j + 9 for lane j of four
/// (wgmma's accumulator); its operand has neighbouring places 4j to 4j + 3.
TEST(ValueTiles, KeysStandWhereTheirWeightsAre_S14) {
  for (int lane = 0; lane < 4; ++lane) {
    const int keys[] = {2 * lane, 2 * lane + 1, 2 * lane + 8, 2 * lane + 9};
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(ValueTiles::place_of(keys[i]), 4 * lane + i);
      EXPECT_EQ(ValueTiles::key_at(4 * lane + i), keys[i]);
    }
  }
}

/// Tensor cores read 16 bytes of eight neighbouring rows at once: 32 banks of 4 bytes, each once.
TEST(ValueTiles, EightRowsMeetNoBankTwice_S14) {
  const ValueTiles tiles = {128};
  for (int key = 0; key < 32; key += 16) {
    for (int column = 0; column < tiles.rows(); column += 8) {
      std::set<std::int64_t> units;
      for (int i = 0; i < 8; ++i) units.insert(tiles.offset(key, column + i) / 16 % 8);
      EXPECT_EQ(units.size(), 8U) << key << ", " << column;
    }
  }
}

/// The two halves of a row change places as wgmma's 32-byte swizzle has it: bit 4 of the address
/// with bit 7.
TEST(ValueTiles, HalvesAreSwizzledByAddress_S14) {
  const ValueTiles tiles = {64};
  for (int column = 0; column < tiles.rows(); ++column) {
    for (int key = 0; key < ValueTiles::kKeys; ++key) {
      const int in_panel = column * 32 + key % 32 / 16 * 16;
      const std::int64_t plain = std::int64_t{key / 32} * tiles.panel_bytes() + in_panel;
      const std::int64_t swizzled = plain ^ (plain >> 7 & 1) << 4;
      EXPECT_EQ(tiles.offset(key, column) / 16 * 16, swizzled);
    }
  }
}

/// No two packed sequences share a tile, and none lies behind the last one.
TEST(ValueTiles, PackedSequencesBeginTilesOfTheirOwn_S14) {
  for (int first = 0; first < 300; first += 7) {
    for (int second = 0; second < 300; second += 11) {
      const std::array<std::int32_t, 4> cu = {0, first, first + second, first + second + 1};
      const Sequences sequences = {cu.data(), cu.data(), 300, 300};
      std::int64_t end = 0;
      for (int b = 0; b < 3; ++b) {
        const Sequence sequence = sequences.at(b);
        EXPECT_GE(ValueTiles::first_of(sequence), end);
        end = ValueTiles::first_of(sequence) + ValueTiles::count(sequence.seqlen_k);
      }
      EXPECT_LE(end, ValueTiles::count_packed(cu[3], 3));
    }
  }
}

TEST(ValueTiles, ColumnsArePaddedToThoseOfKernels_S14) {
  for (int dim = 1; dim <= 256; ++dim) {
    const int columns = ValueTiles::padded(dim);
    EXPECT_GE(columns, dim);
    EXPECT_TRUE(columns == 64 || ValueTiles::padded(columns) == columns);
  }
}

}  // namespace
}  // namespace tessera::core
