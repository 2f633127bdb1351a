// Which pieces of work a decoding block has: its span of the line of items (core::Spans). Lengths
// are read here, so no host knows them. Blocks take spans in falling order: who merges an item's
// parts has the first of them, and waits only for blocks with smaller numbers than its own, which
// began before it.
#pragma once

#include "core/work.h"
#include "cuda/mma/decode_params.h"

namespace tessera::cuda::mma {

/// A key/value head of a sequence.
struct DecodeItem {
  core::Sequence sequence;
  core::Rows rows;
  core::KeyTiles tiles;
  int head = 0;
  core::SpanItem place;
};

/// What the walk keeps in shared memory: registers are few.
struct DecodeShared {
  DecodeItem item;
  bool exists;  ///< the item
  bool fresh;   ///< it has not been shown yet
  std::int64_t sums[8];
  std::int64_t found[2];  ///< batch, start
};

static_assert(sizeof(DecodeShared) <= kWalkBytes);

template <core::Kernel K>
class DecodeWalk {
  static constexpr int kThreads = decode_threads(K), kWarps = kThreads / 32;
  static_assert(kWarps <= 8);

 public:
  __device__ __forceinline__ DecodeWalk(const DecodeParams& params, DecodeShared& shared)
      : p(params),
        item(shared.item),
        spans(params.spans),
        span(spans.count - 1 - static_cast<int>(blockIdx.x)),
        shared_(shared) {
    std::int64_t mine = 0;
    for (int b = static_cast<int>(threadIdx.x); b < p.batch; b += kThreads) mine += cost_of(b);
    std::int64_t all;
    sum_before(mine, all);
    spans.cut(all);
    find(span * spans.length, all);
  }

  /// Turns to the next item of which the span has units; false: there is none. All threads.
  __device__ __forceinline__ bool next() {
    do {
      __syncthreads();
      if (threadIdx.x == 0) step();
      __syncthreads();
      if (!shared_.exists) return false;
      units = spans.units_of(item.place, span);
    } while (units.empty());
    return true;
  }

  const DecodeParams& p;
  const DecodeItem& item;
  core::Spans spans;
  const int span;
  core::Range units;  ///< of the item

 private:
  __device__ __forceinline__ void step() {
    DecodeItem& to = shared_.item;
    if (!shared_.fresh) {
      to.place.start += spans.cost(to.place.units);
      if (++to.head == p.heads) {
        to.head = 0;
        shared_.exists = to.sequence.batch + 1 < p.batch;
        if (shared_.exists) turn_to(to.sequence.batch + 1);
      }
    }
    shared_.fresh = false;
    shared_.exists = shared_.exists && to.place.start < (span + 1) * spans.length;
  }

  __device__ __forceinline__ void turn_to(int batch) {
    DecodeItem& to = shared_.item;
    to.sequence = p.sequences.at(batch);
    p.cache.place(to.sequence);
    to.rows = {to.sequence.seqlen_q, p.group};
    to.tiles = tiles_of(to.sequence);
    to.place.units = to.tiles.units(p.unit_tiles);
  }
  __device__ __forceinline__ core::KeyTiles tiles_of(const core::Sequence& sequence) const {
    const core::SequenceMask mask = p.mask.of(p.sequences, sequence);
    return {mask.runs_of({0, sequence.seqlen_q}), kTileKeys};
  }
  /// Of all heads of a sequence.
  __device__ __forceinline__ std::int64_t cost_of(int batch) const {
    core::Sequence sequence = p.sequences.at(batch);
    p.cache.place(sequence);
    return spans.cost(tiles_of(sequence).units(p.unit_tiles)) * p.heads;
  }

  /// The sum of x over the threads before this one; all: over all of them.
  __device__ __forceinline__ std::int64_t sum_before(std::int64_t x, std::int64_t& all) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    std::int64_t sum = x;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const std::int64_t other = __shfl_up_sync(~0U, sum, i);
      if (lane >= i) sum += other;
    }
    if (lane == 31) shared_.sums[warp] = sum;
    __syncthreads();
    std::int64_t before = 0;
    all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before = all;
      all += shared_.sums[w];
    }
    __syncthreads();
    return before + sum - x;
  }

  /// The item at a position of the line.
  __device__ __forceinline__ void find(std::int64_t position, std::int64_t all) {
    const bool exists = position < all;
    std::int64_t passed = 0;
    for (int first = 0; exists && passed <= position; first += kThreads) {
      const int mine = first + static_cast<int>(threadIdx.x);
      const std::int64_t cost = mine < p.batch ? cost_of(mine) : 0;
      std::int64_t together;
      const std::int64_t start = passed + sum_before(cost, together);
      if (start <= position && position < start + cost) {
        shared_.found[0] = mine;
        shared_.found[1] = start;
      }
      passed += together;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    shared_.fresh = true;
    shared_.exists = exists;
    if (!exists) return;
    turn_to(static_cast<int>(shared_.found[0]));
    DecodeItem& to = shared_.item;
    const std::int64_t of_head = spans.cost(to.place.units);
    to.head = static_cast<int>((position - shared_.found[1]) / of_head);
    to.place.start = shared_.found[1] + to.head * of_head;
  }

  DecodeShared& shared_;
};

}  // namespace tessera::cuda::mma
