// What follows from a Hopper row of the catalog that decodes with qv: shared memory. Read by the
// kernel (latent.h) and by its launch.
#pragma once

#include "core/kernel.h"
#include "core/mma_shape.h"
#include "core/scales.h"

namespace tessera::cuda::sm90 {

/// Warps that fetch a tile.
inline constexpr int kLatentLoaders = 4;

/// Blocks of keys and values under way, and those that are multiplied, of which values of 8 bits
/// take two or three: warpgroups have a block each.
TESSERA_HD constexpr int latent_stages(const core::Kernel& row) {
  if (!core::widens(row)) return 2;
  return row.block_m > 32 ? 3 : 4;
}
/// Groups of columns that may have scales of their own.
TESSERA_HD constexpr int latent_groups(const core::Kernel& row) {
  return core::ceil_div(row.head_dim_v, core::kScaledColumns);
}
/// Whether queries that meet values of 8 bits become pairs of e4m3 (latent_products.h).
TESSERA_HD constexpr bool latent_pairs(const core::Kernel& row) {
  return core::widens(row) && core::dtype_of(row.operand) == Dtype::bf16;
}
/// Whether values of 8 bits and their keys lie in chunks of columns, as those of 16 bits do, so
/// that products take both operands from shared memory: where so many rows have them that registers
/// do not suffice for operands.
TESSERA_HD constexpr bool latent_chunked(const core::Kernel& row) {
  return !core::widens(row) || (latent_pairs(row) && row.block_m > 32);
}
/// Chunks of 128 bytes that a query has with the one that meets values; and a key with its value,
/// where that is of 16 bits.
TESSERA_HD constexpr int latent_chunks(const core::Kernel& row) {
  return (row.head_dim + row.head_dim_v) * 2 / 128;
}
/// A key beside values of 8 bits that are in no chunks: they lie one after another, as in
/// FlashMLA's rows of 656 bytes, value, scales, key. These bytes, 16 more than a multiple of 128,
/// take eight rows to different banks. In chunks, which are as many bytes, keys are the last, and
/// then come scales.
/// @{
TESSERA_HD constexpr int latent_scales_at(const core::Kernel& row) {
  return latent_chunked(row) ? row.block_n * (row.head_dim_v + row.head_dim * 2) : row.head_dim_v;
}
TESSERA_HD constexpr int latent_key_at(const core::Kernel& row) {
  return row.head_dim_v + latent_groups(row) * 4;
}
TESSERA_HD constexpr int latent_row_bytes(const core::Kernel& row) {
  return latent_key_at(row) + row.head_dim * 2;
}
/// @}
/// Bytes of a block's queries; and of its keys and values, with values' scales.
/// @{
TESSERA_HD constexpr int latent_query_bytes(const core::Kernel& row) {
  return latent_chunks(row) * row.block_m * 128;
}
TESSERA_HD constexpr int latent_key_bytes(const core::Kernel& row) {
  return row.block_n * (core::widens(row) ? latent_row_bytes(row) : latent_chunks(row) * 128);
}
/// @}
/// How often weights of a block lie in shared memory: where they have few rows, once for each group
/// of columns, times its scales. And the bytes of all, 128 a key for 64 of them. And of how many
/// blocks there are weights: where they have makers of their own, these are ahead.
/// @{
TESSERA_HD constexpr int latent_weights(const core::Kernel& row) {
  return core::widens(row) && row.block_m <= 16 ? latent_groups(row) : 1;
}
TESSERA_HD constexpr int latent_weight_bytes(const core::Kernel& row) {
  return row.block_n * 128 * core::ceil_div(latent_weights(row) * row.block_m, 64);
}
TESSERA_HD constexpr int latent_weight_stages(const core::Kernel& row) {
  return core::widens(row) ? 2 : 1;
}
/// @}
/// Buffers of all rings (LatentRings).
TESSERA_HD constexpr int latent_buffers(const core::Kernel& row) {
  const int weights = core::widens(row) ? 2 * latent_weight_stages(row) + 1 : 0;
  return row.q_stages + latent_stages(row) + weights;
}
/// Where the warps' pieces, states of rows and barriers lie.
TESSERA_HD constexpr int latent_other_bytes(const core::Kernel& row) {
  return core::widens(row) ? 9728 : 2048;
}
/// Queries, the ring, weights of a block, and the rest.
TESSERA_HD constexpr int latent_bytes(const core::Kernel& row) {
  return row.q_stages * latent_query_bytes(row) + latent_stages(row) * latent_key_bytes(row) +
         latent_weight_stages(row) * latent_weight_bytes(row) + latent_other_bytes(row) + 1024;
}

}  // namespace tessera::cuda::sm90
