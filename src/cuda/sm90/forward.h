// The forward pass on Hopper: FlashAttention-3's warp specialisation (Shah et al. 2024, section 3),
// one tile of block_m query rows after another on a grid of one block per multiprocessor.
//
// Warpgroup 0 produces (forward_producer.h): it finds each tile, describes it, and asks the copy
// engine for its Q and its blocks of keys and values, from the right (the diagonal) to the left,
// into rings. The other warpgroups consume, 64 rows each (forward_consumer.h). Of wide heads two
// blocks of threads share a tile (pair.h), and sum S (score_sums.h).
#pragma once

#include "cuda/ptx/grid.h"
#include "cuda/sm90/forward_buffers.h"
#include "cuda/sm90/forward_consumer.h"
#include "cuda/sm90/forward_pages.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/sm90/forward_producer.h"

namespace tessera::cuda::sm90 {

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void forward(const ForwardParams& p, char* shared) {
  using S = ForwardShape<K>;
  const ForwardBuffers<K> buffers(shared);
  // Told to be the same for the whole warp.
  const int group = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) buffers.initialise(p.copies_rows() ? kPageWarps : S::kProducers);
  if constexpr (K.cluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  if constexpr (core::waits_for_grids(K)) ptx::wait_for_grids();
  if (group == 0) {
    ptx::lower_registers<S::kProducerRegisters>();
    if constexpr (!K.any_layout && !S::kScaled) {
      if (p.box_keys > 0) {
        fetch_pages(p, buffers);
        return;
      }
    }
    if constexpr (schedules_apart(K)) {
      const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0);
      if (threadIdx.x % 32 != 0) return;
      if (warp == 0) ForwardProducer<K>(p, buffers).run();
      if (warp == 1) ForwardScheduler<K>(p, buffers).run();
    } else if (threadIdx.x < S::kProducers) {
      ForwardProducer<K>(p, buffers).run();
    }
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    ForwardConsumer<K>(p, buffers, group - 1).run();
    // Until then the other block may still store here.
    if constexpr (K.cluster > 1) ptx::cluster_sync();
  }
}

}  // namespace tessera::cuda::sm90
