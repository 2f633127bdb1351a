// Scores of head dims that two blocks of threads share (a cluster): each has half of the columns of
// queries, keys and values, so each has half of every score's sum. The halves are exchanged through
// the blocks' shared memory; from there on both do the same, to the bit, for their own columns of
// values.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/sm90/forward_buffers.h"

namespace tessera::cuda::sm90 {

/// Of a warp, which exchanges with the warp of the same number in the other block: a thread's
/// fragment is that thread's there, too.
template <core::Kernel K>
class ScoreSums {
  static constexpr int kCount = K.block_n / 2;  ///< scores of a thread
  static constexpr std::uint32_t kBytes = kCount * 32 * 4;
  static constexpr std::uint32_t kStride = 32 * 16;  ///< from four of a thread's to the next

 public:
  __device__ __forceinline__ ScoreSums(const ForwardBuffers<K>& buffers, std::uint32_t warp,
                                       std::uint32_t lane)
      : room_(buffers.sums + warp * kBytes + lane * 16),
        full_(buffers.sums_full + warp * 8),
        other_(buffers.block() ^ 1),
        leads_(lane == 0) {}

  /// Adds the other block's scores to s. Both wait for each other.
  __device__ __forceinline__ void add(float (&s)[kCount]) {
    constexpr std::uint32_t kEmpty = K.block_m / 16 * 8;  // from a full barrier to the empty one
    if (leads_) ptx::mbarrier_expect(full_, kBytes);
    ptx::mbarrier_wait(full_ + kEmpty, parity_ ^ 1);
    const std::uint32_t to = ptx::address_in(other_, room_);
    const std::uint32_t full = ptx::address_in(other_, full_);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      ptx::store_async(to + i * kStride, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3], full);
    }
    ptx::mbarrier_wait(full_, parity_);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      float x[4];
      ptx::load_shared(room_ + i * kStride, x[0], x[1], x[2], x[3]);
      for (int j = 0; j < 4; ++j) s[4 * i + j] += x[j];
    }
    __syncwarp();
    if (leads_) ptx::mbarrier_arrive_there(full + kEmpty);
    parity_ ^= 1;
  }

 private:
  const std::uint32_t room_, full_;  ///< the warp's in this block
  const std::uint32_t other_;
  const bool leads_;
  std::uint32_t parity_ = 0;  ///< of the exchange that comes next
};

}  // namespace tessera::cuda::sm90
