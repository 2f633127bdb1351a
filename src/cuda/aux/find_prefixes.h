// Finds prefixes that neighbouring sequences share (core/prefixes.h), on any GPU. A block of
// threads compares the page table's row of a sequence with that of the one before, in sweeps; the
// last block waits for all others, which began before it, and chooses.
#pragma once

#include "cuda/aux/find_prefixes_params.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/memory.h"

namespace tessera::cuda::aux {

/// A sequence as it is in the cache, and the columns of it that may be shared.
struct Shareable {
  core::Sequence sequence;
  int columns = 0;
};
__device__ __forceinline__ Shareable shareable_of(const FindPrefixesParams& p, int batch) {
  Shareable one = {p.sequences.at(batch)};
  p.cache.place(one.sequence);
  const core::SequenceMask mask = p.mask.of(p.sequences, one.sequence);
  one.columns = core::shareable_columns(p.cache.pages, one.sequence, mask);
  return one;
}

/// Columns in which the sequence has the pages of the one before, from the first on. All threads of
/// the block come; they get the same.
__device__ __forceinline__ int common_columns(const FindPrefixesParams& p, int batch) {
  constexpr int kWarps = kFindThreads / 32, kEach = 8;  // columns of a thread in a sweep
  __shared__ int firsts[2][kWarps];
  if (batch == 0) return 0;
  const Shareable a = shareable_of(p, batch - 1), b = shareable_of(p, batch);
  const int columns = core::min(a.columns, b.columns);
  const core::Pages& pages = p.cache.pages;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int first = 0, sweep = 0; first < columns; first += kFindThreads * kEach, ++sweep) {
    int differs = columns;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      const int column = first + i * kFindThreads + thread;
      const int there = core::min(column, columns - 1);
      const bool same = pages.at(a.sequence.entry_k, there) == pages.at(b.sequence.entry_k, there);
      if (column < columns && !same) differs = column;
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      differs = core::min(differs, __shfl_xor_sync(~0U, differs, lanes));
    }
    int* const of_warps = firsts[sweep % 2];
    if (thread % 32 == 0) of_warps[thread / 32] = differs;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) differs = core::min(differs, of_warps[w]);
    if (differs < columns) return differs;
  }
  return columns;
}

/// Of the last block: what the others have found, and segments of it.
__device__ __forceinline__ void choose(const FindPrefixesParams& p) {
  constexpr int kMost = 512;  // sequences that shared memory has room for
  __shared__ int common[kMost];
  alignas(core::CommonKeys) __shared__ char near_list[kMost * sizeof(core::CommonKeys)];
  alignas(core::OwnKeys) __shared__ char near_own[kMost * sizeof(core::OwnKeys)];
  const bool fits = p.rules.batch <= kMost;
  core::CommonKeys* const list = fits ? reinterpret_cast<core::CommonKeys*>(near_list) : p.list;
  core::OwnKeys* const own = fits ? reinterpret_cast<core::OwnKeys*>(near_own) : p.own;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int b = thread; b < p.rules.batch; b += kFindThreads) {
    std::uint64_t word;
    do {
      word = ptx::load_relaxed(p.common + b);
    } while (static_cast<std::uint32_t>(word >> 32) != p.ticket);
    if (fits) {
      common[b] = static_cast<int>(static_cast<std::uint32_t>(word));
      p.common[b] = 0;
    }
    own[b] = {};
  }
  __syncthreads();
  if (thread == 0) {
    const int runs = core::list_common_keys(
        p.rules.batch,
        [&](int b) {
          return fits ? common[b] : static_cast<int>(static_cast<std::uint32_t>(p.common[b]));
        },
        list);
    const core::ChosenPrefixes chosen = core::choose_prefixes(
        list, runs, p.rules, own,
        [&p](int i, const core::Segment& prefix) { p.segments[p.rules.batch + i] = prefix; });
    *p.count = {p.rules.batch + chosen.count, chosen.cost};
  }
  __syncthreads();
#pragma unroll 1
  for (int b = thread; b < p.rules.batch; b += kFindThreads) {
    core::Sequence sequence = p.sequences.at(b);
    p.cache.place(sequence);
    p.segments[b] = core::rest_of(b, sequence.seqlen_k, own[b]);
    if (!fits) p.common[b] = 0;
  }
}

/// The kernel; a block for each sequence.
__device__ __forceinline__ void find_prefixes(const FindPrefixesParams& p) {
  ptx::wait_for_grids();
  ptx::launch_dependents();
  const int batch = static_cast<int>(blockIdx.x);
  const int keys = common_columns(p, batch) * p.cache.pages.size;
  if (threadIdx.x == 0) {
    ptx::store_relaxed(p.common + batch,
                       std::uint64_t{p.ticket} << 32 | static_cast<std::uint32_t>(keys));
  }
  if (batch == p.rules.batch - 1) choose(p);
}

}  // namespace tessera::cuda::aux
