// What follows from a GPU row by mma.sync and cp.async: warps, threads, shared memory. Read by the
// planner, which compares it with what a device grants, by kernels and by launches.
#pragma once

#include "core/kernel.h"

namespace tessera::core {

inline constexpr int kChunkBytes = 128;  ///< of a row in a chunk of shared memory, swizzled

/// Chunks that so many rows of so many bytes have, in bytes.
TESSERA_HD constexpr int chunk_bytes(int row_bytes, int rows) {
  return ceil_div(row_bytes, kChunkBytes) * rows * kChunkBytes;
}

/// Warps that share rows of a forward, or keys of a backward, where one would not have registers
/// for all their outputs: each has some of the columns.
TESSERA_HD constexpr int mma_parts(const Kernel& row) {
  constexpr int kMost = 32 * 128;  // outputs of a warp
  if (row.stages == 0) return 1;
  const int columns =
      row.pass == Pass::forward ? row.head_dim_v : max(row.head_dim, row.head_dim_v);
  int parts = 1;
  while (row.tile_m * columns > parts * kMost) parts *= 2;
  return parts;
}

// ---- the forward (cuda/mma/forward.h), and what the backward has alike ----

/// A warp, or as many as share rows, has tile_m rows; backward tile_m keys.
TESSERA_HD constexpr int mma_threads(const Kernel& row) {
  if (row.pass == Pass::forward) return row.block_m / row.tile_m * 32 * mma_parts(row);
  return row.block_n / row.tile_m * mma_parts(row) * (splits_roles(row) ? 2 : 1) * 32;
}
/// Of a tile of queries, and of the buffers of keys and of values.
/// @{
TESSERA_HD constexpr int mma_query_bytes(const Kernel& row) {
  return chunk_bytes(row.head_dim * 2, row.block_m);
}
TESSERA_HD constexpr int mma_key_bytes(const Kernel& row) {
  return chunk_bytes(row.head_dim * 2, row.block_n);
}
TESSERA_HD constexpr int mma_value_bytes(const Kernel& row) {
  return chunk_bytes(row.head_dim_v * 2, row.block_n);
}
/// @}
/// Whether warps of a forward keep their queries in registers: where there are registers for it.
TESSERA_HD constexpr bool mma_keeps_queries(const Kernel& row) {
  return row.tile_m * row.head_dim <= 32 * 64;
}
/// What warps that share rows tell each other (cuda/mma/shared_rows.h): weights of 16 bits; and a
/// number of every row, a flag of themselves, from each.
/// @{
TESSERA_HD constexpr int mma_weight_bytes(const Kernel& row) {
  return mma_parts(row) == 1 ? 0 : row.block_m * row.block_n * 2;
}
TESSERA_HD constexpr int mma_told_bytes(const Kernel& row) {
  if (mma_parts(row) == 1) return 0;
  return (row.block_m + row.block_m / row.tile_m) * mma_parts(row) * 4;
}
/// @}
TESSERA_HD constexpr int mma_buffer_bytes(const Kernel& row) {
  return mma_query_bytes(row) + row.stages * (mma_key_bytes(row) + mma_value_bytes(row)) +
         mma_weight_bytes(row);
}
inline constexpr int kTileStateBytes = 128;  ///< room for what is said of a tile
/// Of where a block's values lie in pages: a number a key.
TESSERA_HD constexpr int mma_place_bytes(const Kernel& row) { return row.block_n * 8; }
/// With room to align rows.
TESSERA_HD constexpr int mma_forward_bytes(const Kernel& row) {
  return mma_buffer_bytes(row) + kTileStateBytes + mma_place_bytes(row) + mma_told_bytes(row) +
         kChunkBytes;
}

// ---- the backward (cuda/mma/backward.h) ----

/// Warps that share a block of keys, tile_m each, or as many as share them; of split roles there
/// are as many again.
TESSERA_HD constexpr int mma_key_warps(const Kernel& row) {
  return row.block_n / row.tile_m * mma_parts(row);
}
/// Columns of values that warps hold in registers, as operands: as many as there are registers for
/// where shared memory is scarce.
TESSERA_HD constexpr int mma_held_values(const Kernel& row) {
  if (mma_parts(row) > 1) return row.head_dim_v;
  if (!splits_roles(row)) return row.tile_m == 16 ? row.head_dim_v : 0;
  return row.block_m < 64 ? min(row.head_dim_v, 128) : 0;
}
/// Of the rest of a block's values; of queries and of their gradients; of their shifts, or deltas.
/// @{
TESSERA_HD constexpr int mma_kept_value_bytes(const Kernel& row) {
  return chunk_bytes((row.head_dim_v - mma_held_values(row)) * 2, row.block_n);
}
TESSERA_HD constexpr int mma_gradient_bytes(const Kernel& row) {
  return chunk_bytes(row.head_dim_v * 2, row.block_m);
}
TESSERA_HD constexpr int mma_statistic_bytes(const Kernel& row) { return row.block_m * 4; }
/// @}
/// Of dS: a row a key. Where warps share keys, P is there, too (mma_weight_bytes).
TESSERA_HD constexpr int mma_score_bytes(const Kernel& row) {
  return row.block_n * row.block_m * 2;
}
/// Of what one role tells the other: P in fp32, and with extras the scores' derivatives in f16.
TESSERA_HD constexpr int mma_exchange_bytes(const Kernel& row) {
  if (!splits_roles(row)) return 0;
  return row.block_n * row.block_m * (row.extra == Extra::all ? 6 : 4);
}
/// Of what warps that share keys tell the others of their role: what their columns add to scores of
/// which these make weights.
TESSERA_HD constexpr int mma_partial_bytes(const Kernel& row) {
  return 2 * (mma_parts(row) - 1) * row.block_n * row.block_m * 4;
}
inline constexpr int kKeyTileBytes = 256;  ///< room for what is said of a block of keys
TESSERA_HD constexpr int mma_backward_bytes(const Kernel& row) {
  return mma_key_bytes(row) + mma_kept_value_bytes(row) +
         row.q_stages * (mma_query_bytes(row) + mma_statistic_bytes(row)) +
         row.stages * (mma_gradient_bytes(row) + mma_statistic_bytes(row)) + mma_score_bytes(row) +
         mma_exchange_bytes(row) + mma_weight_bytes(row) + mma_partial_bytes(row) + kKeyTileBytes +
         kChunkBytes;
}

// ---- decoding (cuda/mma/decode.h; rows with qv are Hopper's own) ----

inline constexpr int kTileKeys = 16;  ///< that a warp multiplies at a time

/// Who takes tiles of keys in turn: a warp, or as many as share rows.
TESSERA_HD constexpr int decode_teams(const Kernel& row) { return row.block_n / kTileKeys; }
/// Warpgroups that make nothing but weights, of rows with qv: of values of 8 bits.
TESSERA_HD constexpr int decode_scorers(const Kernel& row) {
  if (!row.qv || !widens(row)) return 0;
  return row.block_m > 16 ? 1 : 2;
}
/// Warps of a block; of rows with qv in warpgroups: two that own outputs, one that fetches, those.
TESSERA_HD constexpr int decode_warps(const Kernel& row) {
  if (row.qv) return 4 * (3 + decode_scorers(row));
  return decode_teams(row) * mma_parts(row);
}
/// Columns that a warp has: of queries and keys, of values and outputs.
/// @{
TESSERA_HD constexpr int decode_columns(const Kernel& row) { return row.head_dim / mma_parts(row); }
TESSERA_HD constexpr int decode_value_columns(const Kernel& row) {
  return row.head_dim_v / mma_parts(row);
}
/// @}
TESSERA_HD constexpr int decode_threads(const Kernel& row) { return decode_warps(row) * 32; }
/// Of an element of k or v.
TESSERA_HD constexpr int cached_size(const Kernel& row) { return widens(row) ? 1 : 2; }
/// Of a stage of a warp's ring: its columns of a tile of keys, of one of values, and, where these
/// are of 8 bits, the scales of both.
/// @{
TESSERA_HD constexpr int decode_key_bytes(const Kernel& row) {
  return chunk_bytes(decode_columns(row) * cached_size(row), kTileKeys);
}
TESSERA_HD constexpr int decode_value_bytes(const Kernel& row) {
  return chunk_bytes(decode_value_columns(row) * cached_size(row), kTileKeys);
}
TESSERA_HD constexpr int decode_scale_bytes(const Kernel& row) {
  return widens(row) ? 2 * kTileKeys * 4 : 0;
}
TESSERA_HD constexpr int decode_stage_bytes(const Kernel& row) {
  return decode_key_bytes(row) + decode_value_bytes(row) + decode_scale_bytes(row);
}
/// @}
/// Whether warps may multiply together, each rows of its own, what all of them have fetched.
TESSERA_HD constexpr bool together(const Kernel& row) { return row.block_m > row.tile_m; }
/// Of what is in shared memory; that of wgmma's operands is what their swizzle repeats by.
TESSERA_HD constexpr int ring_alignment(const Kernel& row) {
  return together(row) ? 1024 : kChunkBytes;
}
/// Stages that a warp's output takes at the end of a piece: these hold no tile.
TESSERA_HD constexpr int output_stages(const Kernel& row) {
  return ceil_div(kTileKeys * decode_value_columns(row) * 4,
                  decode_key_bytes(row) + decode_value_bytes(row));
}
TESSERA_HD constexpr int decode_ring_bytes(const Kernel& row) {
  return decode_warps(row) * row.stages * decode_stage_bytes(row);
}
/// What else is in shared memory: every warp's piece and its next one, states of rows.
inline constexpr int kOtherBytes = 2048;
/// Queries of two pieces, the ring, and that.
TESSERA_HD constexpr int decode_bytes(const Kernel& row) {
  return 2 * chunk_bytes(row.head_dim * 2, kTileKeys) + decode_ring_bytes(row) + kOtherBytes +
         ring_alignment(row);
}

// ---- all ----

TESSERA_HD constexpr int mma_bytes(const Kernel& row) {
  if (row.pass == Pass::backward) return mma_backward_bytes(row);
  return row.form == Form::decode ? decode_bytes(row) : mma_forward_bytes(row);
}
/// Blocks of threads of a row by mma.sync that a multiprocessor has at once, where a block may have
/// `most` bytes of shared memory: a multiprocessor has 1 KB more, and gives 1 KB with every block.
TESSERA_HD constexpr int mma_blocks(const Kernel& row, std::int64_t most) {
  constexpr int kReserved = 1024;
  const std::int64_t fitting = (most + kReserved) / (mma_bytes(row) + kReserved);
  return static_cast<int>(min<std::int64_t>(row.blocks, fitting));
}

}  // namespace tessera::core
