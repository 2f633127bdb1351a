// Whose turn it is to add dQ of a block of rows, where that has an order and consumers add it
// themselves (backward_wide.h).
#pragma once

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/memory.h"
#include "cuda/sm90/backward_buffers.h"
#include "cuda/sm90/backward_params.h"

namespace tessera::cuda::sm90 {

/// The last block of keys that the rows see comes first, and tiles are handed out so: a warpgroup
/// waits only for tiles that others have begun before. Pieces of a warpgroup add to what no other
/// one of the block does, so each of the two has turns of its own; with the same one of the other
/// block of a cluster it has it in common.
template <core::Kernel K>
struct QueryTurns {
  const BackwardParams& p;
  const BackwardWords* words;
  int role;     ///< of the block's two warpgroups
  int barrier;  ///< of this one
  bool leads;   ///< speaks for it

  /// What the producer says of an item's dQ.
  __device__ __forceinline__ const PieceOrder& order(std::uint32_t item) const {
    return words->pieces[item % kPieceOrders];
  }
  /// What is there has not been made 0 where somebody is the first to add.
  __device__ __forceinline__ bool first(std::uint32_t item) const { return order(item).rank == 0; }

  __device__ __forceinline__ void take(std::uint32_t item) const {
    if (leads) {
      const std::int32_t* const from = counter(item);
      const int rank = order(item).rank;
      while (ptx::load_acquire(from) / K.cluster != rank) {
      }
    }
    ptx::barrier_sync(barrier, 128);
  }
  __device__ __forceinline__ void pass(std::uint32_t item) const {
    __threadfence();
    ptx::barrier_sync(barrier, 128);
    if (!leads) return;
    if constexpr (K.cluster > 1) {
      ptx::add_release(counter(item), 1);
    } else {
      ptx::store_release(counter(item), order(item).rank + 1);
    }
  }

 private:
  __device__ __forceinline__ std::int32_t* counter(std::uint32_t item) const {
    return p.turns + order(item).index * 2 + role;
  }
};

}  // namespace tessera::cuda::sm90
