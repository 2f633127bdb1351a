// What the decoding kernel is given, and what follows from its row of the catalog: threads, shared
// memory. Filled in by an architecture's launch, read by decode.h.
#pragma once

#include "core/divisor.h"
#include "core/kernel.h"
#include "core/prefixes.h"
#include "core/scales.h"
#include "core/score.h"
#include "core/spans.h"
#include "cuda/source.h"

namespace tessera::cuda::mma {

/// Where blocks leave results of a part of the keys for each other.
struct DecodeParts {
  core::PartWord* words = nullptr;  ///< [slots][core::part_words]
  /// Whether every unit is a part and has a slot: [batch][heads][blocks][units]. Otherwise a span
  /// has one: of the item that began in an earlier span.
  bool by_unit = false;
  int blocks = 0;            ///< by_unit: of rows, of a head at most
  int units = 0;             ///< by_unit: of an item at most
  std::uint32_t ticket = 0;  ///< what no other run that may have left something there has; not 0
};

/// Of a row that reads shared prefixes once (core/prefixes.h), what a kernel before it has found,
/// and where blocks leave what rows see of a prefix: every row's own keys come last.
struct DecodePrefixes {
  const core::Segment* segments = nullptr;  ///< [count]
  const core::SegmentCount* count = nullptr;
  core::PartWord* rows = nullptr;  ///< [levels + 1][rows of q][num_heads][row's head_dim_v / 2]
  std::int64_t level_words = 0;    ///< from one level to the next
  core::Divisor seqlen_q;          ///< of dense queries
};

struct DecodeParams {
  Source q, k, v, qv;
  void* o = nullptr;
  core::Strides o_strides;
  float* softmax_lse = nullptr;  ///< may be null
  std::int64_t lse_head = 0;     ///< elements of softmax_lse from one head to the next

  core::Sequences sequences;
  core::Cache cache;
  core::Scales k_scale, v_scale;  ///< rows that widen: by tensor, head, token or group
  core::Divisor value_groups;     ///< of core::kScaledColumns, in a group of v
  Dtype dtype = Dtype::bf16;      ///< of q and o: rows that widen take both of 16 bits
  core::MaskRules mask;
  const float* sink = nullptr;  ///< null: no sink
  Extras extras;
  core::Score score;

  core::Spans spans;         ///< one a block; items are blocks of rows
  core::Divisor span_count;  ///< spans.count
  core::Divisor unit_tiles;  ///< of core::decode_tile_keys, of a unit
  DecodeParts parts;
  DecodePrefixes prefixes;
  bool looks_ahead = false;  ///< while grids before this one are not done

  int batch = 0, heads = 0;  ///< key/value heads
  int num_heads = 0;
  core::Divisor group;      ///< query heads of a key/value head
  core::Divisor page_size;  ///< cache.pages.size
  int head_dim = 0, head_dim_v = 0;
};

inline constexpr int kTileKeys = 16;     ///< that a warp multiplies at a time
inline constexpr int kChunkBytes = 128;  ///< of a row in a chunk of shared memory, swizzled

/// Warps of a block: each with keys of its own, or, of rows with qv, in three warpgroups, or four
/// where two fetch and widen.
TESSERA_HD constexpr int decode_warps(const core::Kernel& row) {
  if (row.qv) return core::widens(row) ? 16 : 12;
  return row.block_n / kTileKeys;
}
TESSERA_HD constexpr int decode_threads(const core::Kernel& row) { return decode_warps(row) * 32; }
/// Of an element of k or v.
TESSERA_HD constexpr int cached_size(const core::Kernel& row) { return core::widens(row) ? 1 : 2; }
template <int kSize>
struct CachedElement {
  using Type = std::uint16_t;
};
template <>
struct CachedElement<1> {
  using Type = std::uint8_t;
};
/// Chunks that 16 rows of so many bytes have, in bytes.
TESSERA_HD constexpr int chunk_bytes(int row_bytes) {
  return core::ceil_div(row_bytes, kChunkBytes) * kTileKeys * kChunkBytes;
}
/// Of a stage of the ring: a tile of keys, one of values, and, where these are of 8 bits, the
/// scales of both.
/// @{
TESSERA_HD constexpr int key_bytes(const core::Kernel& row) {
  return chunk_bytes(row.head_dim * cached_size(row));
}
TESSERA_HD constexpr int value_bytes(const core::Kernel& row) {
  return chunk_bytes(row.head_dim_v * cached_size(row));
}
TESSERA_HD constexpr int scale_bytes(const core::Kernel& row) {
  return core::widens(row) ? 2 * kTileKeys * 4 : 0;
}
TESSERA_HD constexpr int stage_bytes(const core::Kernel& row) {
  return key_bytes(row) + value_bytes(row) + scale_bytes(row);
}
/// @}
/// Whether warps may multiply together, each rows of its own, what all of them have fetched.
TESSERA_HD constexpr bool together(const core::Kernel& row) { return row.block_m > row.tile_m; }
/// Of what is in shared memory; that of wgmma's operands is what their swizzle repeats by.
TESSERA_HD constexpr int ring_alignment(const core::Kernel& row) {
  return together(row) ? 1024 : 128;
}
/// Stages that a warp's output takes at the end of a piece: these hold no tile.
TESSERA_HD constexpr int output_stages(const core::Kernel& row) {
  return core::ceil_div(kTileKeys * row.head_dim_v * 4, key_bytes(row) + value_bytes(row));
}
/// Stages of a warp. Memory answers after some 0.8 us, in which a multiprocessor takes 30 KB.
TESSERA_HD constexpr int decode_stages(const core::Kernel& row) {
  return core::widens(row) && row.head_dim > 64 ? 6 : row.head_dim <= 64 ? 4 : 3;
}
TESSERA_HD constexpr int decode_ring_bytes(const core::Kernel& row) {
  return decode_warps(row) * decode_stages(row) * stage_bytes(row);
}
/// What else is in shared memory: every warp's piece and its next one, states of rows.
inline constexpr int kOtherBytes = 2048;
/// Queries of two pieces, the ring, and that.
TESSERA_HD constexpr int decode_bytes(const core::Kernel& row) {
  return 2 * chunk_bytes(row.head_dim * 2) + decode_ring_bytes(row) + kOtherBytes +
         ring_alignment(row);
}

}  // namespace tessera::cuda::mma
