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

/// Sequences that shared memory has room for, and what it has of them.
struct NearSequences {
  static constexpr int kMost = 512;
  int seqlens[kMost];
  int common[kMost];
  std::uint32_t changes[kMost / 32];  ///< a bit each: other common keys than the one before
  core::CommonKeys list[kMost];
  core::OwnKeys own[kMost];

  /// All threads of the block come, once `common` is there.
  __device__ __forceinline__ void find_changes(int batch) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int first = 0; first < batch; first += kFindThreads) {
      const int b = first + thread;
      const bool changes_here = b > 0 && b < batch && common[b] != common[b - 1];
      const unsigned bits = __ballot_sync(~0U, changes_here);
      if (thread % 32 == 0) changes[b / 32] = bits;
    }
  }
  /// The first sequence behind b, at most `batch`, with such a bit.
  __device__ __forceinline__ int next(int b, int batch) const {
    ++b;
    for (int word = b / 32; b < batch; b = ++word * 32) {
      const std::uint32_t bits = changes[word] >> b % 32;
      if (bits != 0) return b + __ffs(static_cast<int>(bits)) - 1;
    }
    return batch;
  }
};

/// Of the last block: what the others have found, and segments of it.
__device__ __forceinline__ void choose(const FindPrefixesParams& p) {
  alignas(NearSequences) __shared__ char memory[sizeof(NearSequences)];
  NearSequences& near = *reinterpret_cast<NearSequences*>(memory);
  const int batch = p.rules.batch;
  const bool fits = batch <= NearSequences::kMost;
  core::CommonKeys* const list = fits ? near.list : p.list;
  core::OwnKeys* const own = fits ? near.own : p.own;
  const int thread = static_cast<int>(threadIdx.x);
  const auto seqlen_of = [&p](int b) {
    core::Sequence sequence = p.sequences.at(b);
    p.cache.place(sequence);
    return sequence.seqlen_k;
  };
#pragma unroll 1
  for (int b = thread; b < batch; b += kFindThreads) {
    if (fits) near.seqlens[b] = seqlen_of(b);
    std::uint64_t word;
    do {
      word = ptx::load_relaxed(p.common + b);
    } while (static_cast<std::uint32_t>(word >> 32) != p.ticket);
    if (fits) {
      near.common[b] = static_cast<int>(static_cast<std::uint32_t>(word));
      p.common[b] = 0;
    }
    own[b] = {};
  }
  __syncthreads();
  if (fits) {
    near.find_changes(batch);
    __syncthreads();
  }
  if (thread == 0) {
    const int runs = core::list_common_keys(
        batch,
        [&](int b) {
          return fits ? near.common[b] : static_cast<int>(static_cast<std::uint32_t>(p.common[b]));
        },
        [&](int b) { return fits ? near.next(b, batch) : b + 1; }, list);
    const core::ChosenPrefixes chosen = core::choose_prefixes(
        list, runs, p.rules, own,
        [&](int i, const core::Segment& prefix) { p.segments[batch + i] = prefix; });
    *p.count = {batch + chosen.count, chosen.cost};
  }
  __syncthreads();
#pragma unroll 1
  for (int b = thread; b < batch; b += kFindThreads) {
    p.segments[b] = core::rest_of(b, fits ? near.seqlens[b] : seqlen_of(b), own[b]);
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
  if (batch == p.rules.batch - 1) {
    __syncthreads();  // whoever waits for this block's word must not keep its thread from storing
                      // it
    choose(p);
  }
}

}  // namespace tessera::cuda::aux
