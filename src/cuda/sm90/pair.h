// Which part a block of threads has of a tile that a cluster of two shares: all rows, half of the
// columns, or, where they exchange dS, half of the keys. Alone it has all.
#pragma once

#include "core/kernel.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
struct BlockOf {
  static_assert(K.cluster == 1 || (K.cluster == 2 && !K.any_layout && own_dim(K) % kColumns == 0 &&
                                   own_dim_v(K) % kColumns == 0));

  /// The block's number in its cluster, and the other one's.
  /// @{
  __device__ __forceinline__ static int block() {
    return K.cluster == 1 ? 0 : static_cast<int>(blockIdx.x % K.cluster);
  }
  __device__ __forceinline__ static int other() { return block() ^ 1; }
  /// @}
  /// Its first column of queries and keys, and of values.
  /// @{
  __device__ __forceinline__ static int first_column() {
    return exchanges(K) ? 0 : block() * own_dim(K);
  }
  __device__ __forceinline__ static int first_column_v() {
    return exchanges(K) ? 0 : block() * own_dim_v(K);
  }
  /// @}
  /// Its first key of a backward tile's, and the other one's.
  /// @{
  __device__ __forceinline__ static int first_own_key() {
    return exchanges(K) ? block() * own_keys(K) : 0;
  }
  __device__ __forceinline__ static int first_other_key() { return other() * own_keys(K); }
  /// @}
  /// A shared address as descriptors have it: without the block's number, which stands above it.
  __device__ __forceinline__ static std::uint32_t operand(std::uint32_t address) {
    return K.cluster == 1 ? address : address & 0xffffff;
  }
};

}  // namespace tessera::cuda::sm90
