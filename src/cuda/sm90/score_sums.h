// Scores of head dims that two blocks of threads share (a cluster): each has half of the columns of
// queries, keys and values, so each has half of every score's sum. The halves are exchanged through
// the blocks' shared memory; from there on both do the same, to the bit, for their own columns of
// what comes of it.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/sm90/ring.h"

namespace tessera::cuda::sm90 {

/// A consuming warp exchanges with the warp of the same number in the other block: a thread's
/// kCount accumulators are those of that thread there, too.
template <int kCount, int kWarps>
class ScoreSums {
  static constexpr std::uint32_t kBytes = kCount * 32 * 4;  ///< of a warp
  static constexpr std::uint32_t kStride = 32 * 16;         ///< from four of a thread's to the next
  static constexpr std::uint32_t kToEmpty = kWarps * 8;  ///< from a full barrier to the empty one

 public:
  /// rooms: for what the other block's warps send; full: mbarriers of them all, first the full ones
  /// and then the empty ones. other: the other block's number; warp: of those that consume.
  __device__ __forceinline__ ScoreSums(std::uint32_t rooms, std::uint32_t full, int other, int warp)
      : room_(rooms + static_cast<std::uint32_t>(warp) * kBytes),
        full_(full + static_cast<std::uint32_t>(warp) * 8),
        other_(static_cast<std::uint32_t>(other)) {}

  /// Adds the other block's part to s. Both wait for each other.
  __device__ __forceinline__ void add(float (&s)[kCount]) {
    // Made anew each time: registers are scarce.
    const std::uint32_t lane = ptx::opaque(threadIdx.x) % 32, room = room_ + lane * 16;
    if (lane == 0) ptx::mbarrier_expect(full_, kBytes);
    ptx::mbarrier_wait(full_ + kToEmpty, parity_ ^ 1);
    const std::uint32_t to = ptx::address_in(other_, room);
    const std::uint32_t full = ptx::address_in(other_, full_);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      ptx::store_async(to + i * kStride, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3], full);
    }
    ptx::mbarrier_wait(full_, parity_);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      float x[4];
      ptx::load_shared(room + i * kStride, x[0], x[1], x[2], x[3]);
      for (int j = 0; j < 4; ++j) s[4 * i + j] += x[j];
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_there(full + kToEmpty);
    parity_ ^= 1;
  }

 private:
  const std::uint32_t room_, full_, other_;  ///< the first two are the warp's
  std::uint32_t parity_ = 0;                 ///< of the exchange that comes next
};

}  // namespace tessera::cuda::sm90
