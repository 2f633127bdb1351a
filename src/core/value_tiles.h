// How values of 8 bits lie where a GPU's tensor cores multiply them by weights (S14): transposed,
// as those instructions take both operands along the keys that they sum over and none can be turned
// on its way. The one place that knows the layout.
#pragma once

#include "core/kernel.h"
#include "core/sequences.h"

namespace tessera::core {

/// A tile of values of one key/value head: 128 keys in panels of 32, which one instruction sums
/// over. A panel has a row of 32 bytes for every column of v, and behind them rows of ones: their
/// product is the sum of the weights as they were rounded. Tiles count from a sequence's first key;
/// keys behind its last one are zeros.
///
/// In a row keys stand in the order in which a thread's weights become an operand without moving
/// between threads: of 16 neighbours 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. The two halves of a
/// row change places in every other group of four rows, so that eight rows meet no bank of shared
/// memory twice (the 32-byte swizzle of wgmma's descriptors).
struct ValueTiles {
  static constexpr int kKeys = 128;
  static constexpr int kPanelKeys = 32;
  static constexpr int kOnes = 8;             ///< rows of ones
  static constexpr std::uint8_t kOne = 0x38;  ///< 1 as e4m3

  int columns = 0;  ///< of v, with those that padding adds: padded()

  /// The columns that tiles have for head_dim_v: those of the kernels' rows, which take up to 256.
  TESSERA_HD static constexpr int padded(int head_dim_v) {
    constexpr int kSizes[] = {64, 96, 128, 192};
    for (const int size : kSizes) {
      if (head_dim_v <= size) return size;
    }
    return 256;
  }

  TESSERA_HD constexpr int rows() const { return columns + kOnes; }
  TESSERA_HD constexpr int panel_bytes() const { return rows() * kPanelKeys; }
  TESSERA_HD constexpr int tile_bytes() const { return kKeys / kPanelKeys * panel_bytes(); }

  /// Tiles of one head: of a sequence of that many keys, or of all packed ones.
  /// @{
  TESSERA_HD static constexpr std::int64_t count(std::int64_t seqlen_k) {
    return ceil_div<std::int64_t>(seqlen_k, kKeys);
  }
  TESSERA_HD static constexpr std::int64_t count_packed(std::int64_t total_k, std::int64_t batch) {
    return total_k / kKeys + batch;
  }
  /// @}
  /// The first of a sequence; dense ones have a dimension of their own.
  TESSERA_HD static constexpr std::int64_t first_of(const Sequence& sequence) {
    return sequence.packed ? sequence.first_k / kKeys + sequence.batch : 0;
  }

  /// Where one of 16 neighbouring keys stands.
  TESSERA_HD static constexpr int place_of(int key) {
    return (key & 1) | (key & 6) << 1 | (key & 8) >> 2;
  }
  /// Which of them stands at a place.
  TESSERA_HD static constexpr int key_at(int place) {
    return (place & 1) | (place & 12) >> 1 | (place & 2) << 2;
  }
  /// In which half of a column's row of a panel a group of 16 keys stands; and the other way round,
  /// which of a panel's two groups stands in a half.
  TESSERA_HD static constexpr int half_of(int group, int column) {
    return (group ^ column / 4) & 1;
  }
  /// Bytes from a sequence's first tile to an element; columns from `columns` on are ones.
  TESSERA_HD constexpr std::int64_t offset(int key, int column) const {
    const int in_panel = column * kPanelKeys + half_of(key / 16, column) * 16 + place_of(key % 16);
    return std::int64_t{key / kPanelKeys} * panel_bytes() + in_panel;
  }
};

/// Keys after which sums of 8-bit products are promoted, at most. After 512 a sum of equal terms
/// errs by 0.35 % at most, and the sum of weights by as much, so that a constant comes back. Rows
/// whose blocks of keys share one scale promote more rarely.
/// @{
inline constexpr int kPromotedKeys = 512;
inline constexpr int kRarelyPromotedKeys = 768;
/// @}

/// What a block of keys that share a scale of v is a multiple of, for a row.
TESSERA_HD constexpr int keys_of_a_value_scale(const Kernel& row) {
  return shares_scale(row) ? kRarelyPromotedKeys : row.block_n;
}

/// The blocks of keys of a row that are promoted together: a power of two, of which a block of
/// block_v keys that share a scale of v (0: all do) is a multiple; or as many as there are in
/// kRarelyPromotedKeys.
TESSERA_HD constexpr int promoted_blocks(const Kernel& row, std::int64_t block_v) {
  if (shares_scale(row)) return kRarelyPromotedKeys / row.block_n;
  int blocks = 1;
  for (int keys = 2 * row.block_n; keys <= kPromotedKeys && block_v % keys == 0; keys *= 2) {
    blocks *= 2;
  }
  return blocks;
}

}  // namespace tessera::core
