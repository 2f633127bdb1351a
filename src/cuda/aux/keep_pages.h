// The pages of every sequence that its table does not skip (S13), in their order, on any GPU. A
// block of threads has a sequence and goes over its columns in sweeps: all numbers of a sweep are
// asked for at once, and a warp knows by the counts of those before it where its own go.
#pragma once

#include "core/kept_pages.h"
#include "cuda/aux/keep_pages_params.h"
#include "cuda/ptx/grid.h"

namespace tessera::cuda::aux {

/// The kernel; a block for each sequence.
__device__ __forceinline__ void keep_pages(const KeepPagesParams& p) {
  constexpr int kWarps = kKeepThreads / 32, kEach = 16;  // columns of a thread in a sweep
  __shared__ int counts[2][kWarps];
  ptx::wait_for_grids();
  ptx::launch_dependents();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  core::Sequence sequence = p.sequences.at(static_cast<int>(blockIdx.x));
  p.cache.place(sequence);
  const core::Pages& pages = p.cache.pages;
  const int columns = core::page_columns(pages, sequence);
  const std::int64_t row = blockIdx.x * p.stride;
  int all = 0;
#pragma unroll 1
  for (int sweep = 0; sweep * kKeepThreads * kEach < columns; ++sweep) {
    const int first = (sweep * kWarps + warp) * 32 * kEach + lane;
    std::int64_t page[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      page[i] = first + 32 * i < columns ? pages.at(sequence.entry_k, first + 32 * i) : -1;
    }
    int mine = 0;
#pragma unroll
    for (const std::int64_t number : page) mine += __popc(__ballot_sync(~0U, number >= 0));
    int* const of_warps = counts[sweep % 2];
    if (lane == 0) of_warps[warp] = mine;
    __syncthreads();
    int at = all;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += of_warps[w];
      all += of_warps[w];
    }
#pragma unroll
    for (const std::int64_t number : page) {
      const unsigned kept = __ballot_sync(~0U, number >= 0);
      const std::int64_t to = row + at + __popc(kept & ((1U << lane) - 1));
      if (number >= 0 && pages.ids == PageIds::i64) {
        static_cast<std::int64_t*>(p.table)[to] = number;
      } else if (number >= 0) {
        static_cast<std::int32_t*>(p.table)[to] = static_cast<std::int32_t>(number);
      }
      at += __popc(kept);
    }
  }
  if (thread > 0) return;
  const bool has_last = columns > 0 && pages.at(sequence.entry_k, columns - 1) >= 0;
  // A no-op stays one.
  p.seqlens[blockIdx.x] =
      p.cache.filled(sequence.batch) < 0 ? -1 : core::keys_of_pages(pages, sequence, all, has_last);
}

}  // namespace tessera::cuda::aux
