// What follows from a Hopper row of the catalog: threads, shared memory. Read by the kernel and by
// its launch.
#pragma once

#include "core/kernel.h"
#include "core/mma_shape.h"
#include "core/storage.h"
#include "core/value_tiles.h"
#include "cuda/sm90/latent_shape.h"

namespace tessera::cuda::sm90 {

inline constexpr int kStages = 2;       ///< of the rings of keys and of values
inline constexpr int kColumns = 64;     ///< of 16 bits of a chunk: 128 bytes, the swizzle's width
inline constexpr int kRows = 64;        ///< query rows of a warpgroup
inline constexpr int kStagedRows = 16;  ///< of a warp: of O, on their way out
inline constexpr int kCopyingThreads = 128;  ///< of a producer without the copy engine
inline constexpr int kPageWarps = 2;         ///< that fetch keys from pages; values as many
inline constexpr int kLeastBox = 4;          ///< keys of a box that the copy engine is asked for
inline constexpr int kOrderBytes = 128;      ///< room for what is said of a tile
inline constexpr int kTilesAhead = 4;       ///< tiles that are found at most before they are loaded
inline constexpr int kTileLoadsBytes = 64;  ///< room for what is to be loaded for one
inline constexpr int kTileScalesBytes = 64;     ///< and for its scales
inline constexpr int kMaxSharedBytes = 232448;  ///< that a multiprocessor grants a block

inline constexpr int kWordBytes = 288;  ///< room for what the backward's warps tell each other
inline constexpr int kSumBytes = 64 * 64 * 4;  ///< of a piece of dQ (backward_params.h)
inline constexpr int kQuarterBytes = kSumBytes / 4;
inline constexpr int kQuarters = 4;  ///< of a piece, and as many on their way back

// Of the yardstick's kernels (peak.h).
inline constexpr int kPeakThreads = 256;
inline constexpr int kPeakBytes = (64 + 256) * 128;  ///< of its operands
inline constexpr int kPeakSharedBytes = kPeakBytes + 1024;

/// Consuming warpgroups: each has kRows query rows (forward) or keys (backward).
TESSERA_HD constexpr int consumers(const core::Kernel& row) {
  if (splits_roles(row)) return 2;
  return (row.pass == Pass::forward ? row.block_m : row.block_n) / kRows;
}
TESSERA_HD constexpr int threads(const core::Kernel& row) {
  if (row.form == core::Form::decode) return core::decode_threads(row);
  if (row.stages > 0) return core::mma_threads(row);
  return (consumers(row) + 1) * 128;
}

/// Whether blocks of threads share a tile's columns. Columns of queries and keys, and of values,
/// that one has then; and a backward tile's keys that it has, where they share these.
/// @{
TESSERA_HD constexpr bool shares_columns(const core::Kernel& row) {
  return row.cluster > 1 && !exchanges(row);
}
TESSERA_HD constexpr int own_dim(const core::Kernel& row) {
  return row.head_dim / (shares_columns(row) ? row.cluster : 1);
}
TESSERA_HD constexpr int own_dim_v(const core::Kernel& row) {
  return row.head_dim_v / (shares_columns(row) ? row.cluster : 1);
}
TESSERA_HD constexpr int own_keys(const core::Kernel& row) {
  return row.block_n / (exchanges(row) ? row.cluster : 1);
}
/// @}

/// Bytes of one buffer: chunks of columns one after another.
TESSERA_HD constexpr int buffer_bytes(int head_dim, int rows) {
  return core::ceil_div(head_dim, kColumns) * rows * kColumns * 2;
}
/// Whether a forward row's queries and keys have 8 bits and scales; and its values, too.
/// @{
TESSERA_HD constexpr bool has_scales(const core::Kernel& row) {
  return is_scaled(core::score_dtype_of(row.operand));
}
TESSERA_HD constexpr bool is_eight_bit(const core::Kernel& row) {
  return row.operand == core::Operand::e4m3;
}
/// @}
/// Bytes of one buffer of a forward row's queries or keys, and of its values.
/// @{
TESSERA_HD constexpr int along_bytes(const core::Kernel& row, int rows) {
  return buffer_bytes(has_scales(row) ? core::ceil_div(row.head_dim, 2) : own_dim(row), rows);
}
TESSERA_HD constexpr int value_bytes(const core::Kernel& row) {
  if (!is_eight_bit(row)) return buffer_bytes(own_dim_v(row), row.block_n);
  return row.block_n / core::ValueTiles::kPanelKeys *
         core::ValueTiles{row.head_dim_v}.panel_bytes();
}
/// Of the ring of values; what comes behind it is aligned to the swizzle.
TESSERA_HD constexpr int values_bytes(const core::Kernel& row) {
  return core::round_up(kStages * value_bytes(row), is_eight_bit(row) ? 1024 : 1);
}
/// @}
/// Whether a forward row's sums of O that have been promoted are bf16 (promoted_sums.h): where
/// there is no room for them in fp32. And their bytes.
/// @{
TESSERA_HD constexpr bool rounds_promoted(const core::Kernel& row) {
  return is_eight_bit(row) && row.head_dim_v == 256 && row.block_n == 128;
}
TESSERA_HD constexpr int promoted_bytes(const core::Kernel& row) {
  return is_eight_bit(row) ? row.block_m * row.head_dim_v * (rounds_promoted(row) ? 2 : 4) : 0;
}
/// @}
/// Whether a forward row multiplies the last O of a tile before it asks for the next one, and
/// writes it while that one's first S is multiplied: faster where weights take longer than
/// products.
TESSERA_HD constexpr bool writes_first(const core::Kernel& row) {
  return is_eight_bit(row) && (consumers(row) == 2 || row.head_dim == 128);
}
/// Whether a forward row's tiles are found by a warp of their own, while another loads
/// (forward_producer.h). To find one takes longer than a step; of 16 bits that costs nothing.
TESSERA_HD constexpr bool schedules_apart(const core::Kernel& row) {
  return core::takes_tiles(row) && has_scales(row);
}
/// Bytes of what is said of a forward tile.
TESSERA_HD constexpr int order_bytes(const core::Kernel& row) {
  return kOrderBytes + (has_scales(row) ? kTileScalesBytes : 0);
}
/// Whether a forward row's O leaves through the sums' shared memory (staged_rows.h): where tiles
/// are large, and of others it is no faster.
TESSERA_HD constexpr bool stages_rows(const core::Kernel& row) { return core::shares_scale(row); }
/// Bytes for the scores that another block of threads has of its columns (score_sums.h).
TESSERA_HD constexpr int sums_bytes(const core::Kernel& row) {
  return shares_columns(row) ? row.block_m * row.block_n * 4 : 0;
}
/// Their mbarriers: full and empty ones of every warp.
TESSERA_HD constexpr int sum_barriers(const core::Kernel& row) {
  return shares_columns(row) ? 2 * row.block_m / 16 : 0;
}
/// Forward: do the warpgroups read their queries into registers, once a tile, instead of from
/// shared memory at every step? Where that is faster of what has registers for it.
TESSERA_HD constexpr bool holds_queries(const core::Kernel& row) {
  return row.extra == core::Extra::none && consumers(row) == 2 && own_dim(row) >= 96 &&
         own_dim(row) <= 128 && has_scales(row) == is_eight_bit(row);
}
/// Forward, of 8 bits: a thread's scores whose weights are made while O is multiplied. None where
/// there are no registers to hold them.
TESSERA_HD constexpr int held_scores(const core::Kernel& row) {
  const bool holds = has_scales(row) && consumers(row) == 2 && !rounds_promoted(row);
  return holds ? core::first_scores(row) : 0;
}
/// mbarriers of the forward kernel: full and empty of every buffer, those, and of loads. An even
/// number, as what comes behind them is aligned to 16 bytes.
TESSERA_HD constexpr int barriers(const core::Kernel& row) {
  return 2 * (row.q_stages + 2 * kStages) + sum_barriers(row) +
         (schedules_apart(row) ? kTilesAhead : 0);
}
/// Of a block of the forward kernel, with room to align it to the swizzle's 1024 bytes; or none,
/// where there is not so much left and its shared memory is declared to be.
TESSERA_HD constexpr int forward_bytes(const core::Kernel& row) {
  return row.q_stages * (along_bytes(row, row.q_rows) + order_bytes(row)) +
         kStages * along_bytes(row, row.block_n) + values_bytes(row) + promoted_bytes(row) +
         (schedules_apart(row) ? kTilesAhead * kTileLoadsBytes : 0) + sums_bytes(row) +
         8 * barriers(row) + (rounds_promoted(row) ? 0 : 1024);
}
/// Bytes of what consumers exchange besides dS: P in fp32, from one role to the other, and with
/// extras the scores' derivatives in f16; or dQ in fp32, on its way to memory and back.
TESSERA_HD constexpr int exchange_bytes(const core::Kernel& row) {
  const int slopes = row.extra == core::Extra::all ? 2 : 0;
  const int sums = 2 * sums_bytes(row);  // of S^T and dP^T
  return splits_roles(row) ? own_keys(row) * row.block_m * (4 + slopes) + sums
                           : consumers(row) * kSumBytes + kQuarters * kQuarterBytes;
}
/// Backward: buffers of dO. A step's Q is asked for before its dO and given back after it. One
/// where there is no room for more beside what two blocks exchange.
TESSERA_HD constexpr int dout_stages(const core::Kernel& row) {
  if (row.cluster > 1 && own_dim_v(row) > 192) return 1;
  return splits_roles(row) ? row.q_stages : 2;
}
/// Backward: bytes of a block of dS, and of what another block of threads' keys take: its dS twice,
/// and half of their columns.
/// @{
TESSERA_HD constexpr int score_bytes(const core::Kernel& row) {
  return own_keys(row) * row.block_m * 2;
}
TESSERA_HD constexpr int received_bytes(const core::Kernel& row) {
  return exchanges(row) ? 2 * score_bytes(row) + buffer_bytes(row.head_dim / 2, own_keys(row)) : 0;
}
/// @}
/// Backward: mbarriers of two blocks that share tiles: of their warps' sums, of tiles that one
/// hands on to the other, of dS that they exchange.
TESSERA_HD constexpr int pair_barriers(const core::Kernel& row) {
  return row.cluster > 1 ? 2 * sum_barriers(row) + 2 + (exchanges(row) ? 4 : 0) : 0;
}
/// Of the backward kernel: K and V, the rings of Q and dO with a shift and a delta a row, dS twice.
TESSERA_HD constexpr int backward_bytes(const core::Kernel& row) {
  const int k_bytes = buffer_bytes(own_dim(row), own_keys(row));
  const int v_bytes = buffer_bytes(own_dim_v(row), own_keys(row));
  const int q_bytes = buffer_bytes(own_dim(row), row.block_m) + 4 * row.block_m;
  const int dout_bytes = buffer_bytes(own_dim_v(row), row.block_m) + 4 * row.block_m;
  const int handed_over = splits_roles(row) ? 0 : kQuarters;
  return k_bytes + v_bytes + row.q_stages * q_bytes + dout_stages(row) * dout_bytes +
         2 * score_bytes(row) + received_bytes(row) + exchange_bytes(row) +
         8 * (12 + handed_over + pair_barriers(row) + 2 * row.q_stages + 2 * dout_stages(row)) +
         kWordBytes + 1024;
}
TESSERA_HD constexpr int shared_bytes(const core::Kernel& row) {
  if (row.qv) return latent_bytes(row);
  if (row.stages > 0) return core::mma_bytes(row);
  return row.pass == Pass::forward ? forward_bytes(row) : backward_bytes(row);
}

}  // namespace tessera::cuda::sm90
