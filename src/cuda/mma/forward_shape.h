// What follows from a row of the forward by mma.sync: threads, shared memory. Read by the kernel
// and by its launch.
#pragma once

#include "core/kernel.h"

namespace tessera::cuda::mma {

inline constexpr int kColumns = 64;     ///< of 16 bits of a chunk: rows of 128 bytes
inline constexpr int kTileBytes = 128;  ///< room for what is said of a tile

/// A warp has tile_m rows.
TESSERA_HD constexpr int forward_threads(const core::Kernel& row) {
  return row.block_m / row.tile_m * 32;
}
/// Buffers of keys, and as many of values: two where shared memory has room.
TESSERA_HD constexpr int forward_stages(const core::Kernel& row) {
  return row.head_dim > 128 ? 1 : 2;
}
/// Blocks of threads that a multiprocessor has at once.
TESSERA_HD constexpr int forward_blocks(const core::Kernel& row) {
  return row.head_dim > 128 ? 1 : 2;
}
/// Whether warps keep their queries in registers, and look where their rows' diagonal ends: where
/// there are registers for it.
TESSERA_HD constexpr bool forward_spares(const core::Kernel& row) { return row.head_dim <= 64; }

TESSERA_HD constexpr int chunk_bytes(int head_dim, int rows) {
  return core::ceil_div(head_dim, kColumns) * rows * kColumns * 2;
}
TESSERA_HD constexpr int forward_buffer_bytes(const core::Kernel& row) {
  return chunk_bytes(row.head_dim, row.block_m) +
         forward_stages(row) *
             (chunk_bytes(row.head_dim, row.block_n) + chunk_bytes(row.head_dim_v, row.block_n));
}
/// With room to align rows to the swizzle's 1024 bytes.
TESSERA_HD constexpr int forward_bytes(const core::Kernel& row) {
  return forward_buffer_bytes(row) + kTileBytes + 1024;
}

}  // namespace tessera::cuda::mma
