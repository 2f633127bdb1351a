// How O leaves the Hopper forward kernel (forward.h) where tiles of 8 bits are large: a warp lays
// its 16 rows out in its part of the sums' shared memory (promoted_sums.h), which is free by then,
// and the copy engine takes them. Stores of what each thread has touch eight lines each.
#pragma once

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

/// Chunks of kColumns columns, one after another, in the 128-byte swizzle.
template <core::Kernel K>
class StagedRows {
  static constexpr std::uint32_t kRowBytes = kColumns * 2, kChunkBytes = kStagedRows * kRowBytes;
  static constexpr int kChunks = core::ceil_div(K.head_dim_v, kColumns);
  static_assert(kChunks * kChunkBytes <= promoted_bytes(K) / (K.block_m / kStagedRows));

 public:
  /// shared: the warp's part.
  __device__ __forceinline__ StagedRows(std::uint32_t shared, std::uint32_t lane)
      : shared_(shared), lane_(lane) {}

  /// Lays out what o becomes, its rows times their factors, as that type.
  template <Dtype kType, int kAll>
  __device__ __forceinline__ void lay(const float (&o)[kAll], const float (&factor)[2]) const {
    const std::uint32_t row = shared_ + lane_ % kStagedRows * kRowBytes;
    const std::uint32_t unit = lane_ / kStagedRows ^ lane_ % 8;
#pragma unroll
    for (int i = 0; i < K.head_dim_v / 16; ++i) {
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float by = factor[j % 2];
        words[j] = ptx::pack<kType>(o[8 * i + 2 * j] * by, o[8 * i + 2 * j + 1] * by);
      }
      ptx::store_matrices(row + i / 4 * kChunkBytes + (unit ^ i % 4 * 2) * 16, words);
    }
  }

  /// Sends them to a tensor, to the place of its other coordinates.
  __device__ __forceinline__ void send(const ptx::TensorMap& map, int c1, int c2, int c3) const {
    ptx::fence_proxy_async();
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_store_if(lane_ == 0, map, shared_ + c * kChunkBytes, c * kColumns, c1, c2, c3);
    }
    ptx::bulk_commit();
  }
  /// The warp's part may be written to again.
  __device__ __forceinline__ static void await() {
    ptx::bulk_wait_read();
    __syncwarp();
  }

 private:
  const std::uint32_t shared_, lane_;
};

}  // namespace tessera::cuda::sm90
