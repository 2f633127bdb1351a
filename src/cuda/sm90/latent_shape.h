// What follows from a Hopper row of the catalog that decodes with qv: shared memory. Read by the
// kernel (latent.h) and by its launch.
#pragma once

#include "core/kernel.h"

namespace tessera::cuda::sm90 {

inline constexpr int kLatentStages = 2;  ///< blocks of keys and values under way
/// Where the warps' pieces, states of rows and barriers lie.
TESSERA_HD constexpr int latent_other_bytes(const core::Kernel& row) {
  return core::widens(row) ? 5120 : 2048;
}
/// Warps that fetch a tile; of rows that widen there are twice as many, in turns.
inline constexpr int kLatentLoaders = 4;

/// Chunks of 128 bytes that a key with its value has, and a query with the one that meets values.
TESSERA_HD constexpr int latent_chunks(const core::Kernel& row) {
  return (row.head_dim + row.head_dim_v) * 2 / 128;
}
/// Bytes of so many rows.
TESSERA_HD constexpr int latent_row_bytes(const core::Kernel& row, int rows) {
  return latent_chunks(row) * rows * 128;
}
/// Queries, the ring, weights of a block, and the rest.
TESSERA_HD constexpr int latent_bytes(const core::Kernel& row) {
  return row.q_stages * latent_row_bytes(row, row.block_m) +
         kLatentStages * latent_row_bytes(row, row.block_n) + row.block_n * 128 +
         latent_other_bytes(row) + 1024;
}

}  // namespace tessera::cuda::sm90
