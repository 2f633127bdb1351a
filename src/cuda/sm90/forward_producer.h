// The producer of the Hopper forward kernel: it decides which tiles this block computes, tells the
// consumers, and fills the buffers that they read. One thread asks the copy engine to; of 8 bits a
// thread of another warp finds the tiles, which takes longer than a step. In rows that take any
// layout a warpgroup does all by itself, its threads on the same way. Where keys lie in pages,
// warps do (forward_pages.h).
#pragma once

#include "cuda/sm90/forward_tiles.h"

namespace tessera::cuda::sm90 {

/// Where the row of one of the keys lies, in pages or not; false: in a page that does not exist.
__device__ __forceinline__ bool find_slot(const std::uint16_t*& from, const Source& source,
                                          const core::Cache& cache, const LoadRows& keys, int key) {
  std::int64_t entry = keys.batch;
  int slot = keys.row + key;
  if (cache.pages.table != nullptr) {
    const core::Pages::Place place = cache.pages.place(slot);
    entry = cache.pages.at(keys.batch, place.column);
    if (!cache.pages.exists(entry)) return false;
    slot = place.slot;
  }
  from = static_cast<const std::uint16_t*>(source.data) + entry * source.strides.batch +
         keys.head * source.strides.head + slot * source.strides.seqlen;
  return true;
}

/// Finds tiles for the warp that loads, one ahead of those whose orders are written.
template <core::Kernel K>
class ForwardScheduler : TileProducer<K, false> {
  using Base = TileProducer<K, false>;
  using Base::buffers;
  using Base::p;
  using Base::q_item_;
  using typename Base::S;

 public:
  __device__ __forceinline__ ForwardScheduler(const ForwardParams& params,
                                              const ForwardBuffers<K>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    core::Work work;
    while (Base::next(work)) schedule(work);
    buffers.loads(tile_).blocks.begin = -1;
    buffers.tell_loads(tile_);
#pragma unroll 1
    for (int share = 0; share < S::kShares; ++share) {
      Base::describe_end();
      buffers.q.arrive_full(q_item_++);
    }
  }

 private:
  __device__ __forceinline__ void schedule(const core::Work& work) {
    typename Base::Found found;
    if (!Base::find(work, found)) return;
    found.head_k = p.group.quotient(work.head);
    // What lies there has been read: buffers of queries let go say that all keys of the tile
    // kTilesAhead - 1 before this one have come.
    static_assert(K.q_stages <= (kTilesAhead - 2) * S::kShares);
    buffers.loads(tile_) = Base::loads_of(found);
    buffers.tell_loads(tile_++);
    Base::place_results(found.tile, found.sequence);
#pragma unroll 1
    for (int share = 0; share < S::kShares; ++share) {
      Base::describe(found, share);
      buffers.q.arrive_full(q_item_++);
    }
  }

  std::uint32_t tile_ = 0;  ///< next to be scheduled
};

template <core::Kernel K>
class ForwardProducer : TileProducer<K, false> {
  using Base = TileProducer<K, false>;
  using Base::buffers;
  using Base::p;
  using Base::q_item_;
  using typename Base::S;

 public:
  __device__ __forceinline__ ForwardProducer(const ForwardParams& params,
                                             const ForwardBuffers<K>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    if constexpr (schedules_apart(K)) {
      for (std::uint32_t tile = 0;; ++tile) {
        // Whoever waits for a tile's last values must not wait for the next tile to be found.
        load_values();
        buffers.await_loads(tile);
        const TileLoads loads = buffers.loads(tile);
        if (loads.blocks.begin < 0) break;
        produce(loads);
      }
#pragma unroll 1
      for (int share = 0; share < S::kShares; ++share) {
        buffers.q.claim(q_item_);
        Base::load_queries({}, false, share);
      }
    } else {
      core::Work work;
      while (Base::next(work)) produce(work);
      load_values();
      for (int share = 0; share < S::kShares; ++share) {
        Base::describe_end();
        Base::load_queries({}, false, share);
      }
    }
  }

 private:
  /// A tile that has been scheduled.
  __device__ __forceinline__ void produce(const TileLoads& loads) {
    const bool any = !loads.blocks.empty();
    const auto hand_out = [&](int share) {
      buffers.q.claim(q_item_);
      Base::load_queries(loads.queries, any, share);
    };
    if (!any) hand_out_empty(hand_out);
    load_blocks(
        loads.blocks,
        [&](int n) {
          LoadRows keys = loads.keys;
          keys.row += n * K.block_n;
          keys.valid -= n * K.block_n;
          return keys;
        },
        hand_out,
        [&](int n) {
          if constexpr (S::kEightBit) {
            constexpr std::int64_t kBytes = core::ValueTiles{K.head_dim_v}.panel_bytes();
            panel_ = loads.panels + n * S::kPanels * kBytes;
            panels_ = loads.panel_count - n * S::kPanels;
          }
        });
  }
  /// A tile that has not been.
  __device__ __forceinline__ void produce(const core::Work& work) {
    typename Base::Found found;
    if (!Base::find(work, found)) return;
    Base::place_results(found.tile, found.sequence);
    const LoadRows rows = Base::queries_of(found);
    const bool any = !found.blocks.empty();
    const auto hand_out = [&](int share) {
      Base::describe(found, share);
      Base::load_queries(rows, any, share);
    };
    if (!any) hand_out_empty(hand_out);
    found.head_k = p.group.quotient(work.head);
    load_blocks(found.blocks, [&](int n) { return Base::keys_at(found, n); }, hand_out, [](int) {});
  }

  /// Of a tile without keys. Consumers may wait for values before they look at it; with keys theirs
  /// come in time.
  template <class HandOut>
  __device__ __forceinline__ void hand_out_empty(const HandOut& hand_out) {
    load_values();
    for (int share = 0; share < S::kShares; ++share) hand_out(share);
  }
  /// A tile's keys and values; behind the first keys its shares are handed out. note(n): of the
  /// values of block n, which come next.
  template <class KeysAt, class HandOut, class Note>
  __device__ __forceinline__ void load_blocks(core::Range blocks, const KeysAt& keys_at,
                                              const HandOut& hand_out, const Note& note) {
    for (int n = blocks.end - 1; n >= blocks.begin; --n, ++item_) {
      const bool first = n == blocks.end - 1;
      const LoadRows keys = keys_at(n);
      fetch<S::kChunks, S::kChunkColumns>(buffers.k, item_, p.k, p.k_source, p.head_dim, keys,
                                          buffers.first_column());
      // In the order in which they are wanted: the first warpgroup is ahead of the others.
#pragma unroll 1
      for (int share = 0; share == 0 || (first && share < S::kShares); ++share) {
        if (first) hand_out(share);
        if (share == 0) load_values();
      }
      waiting_ = keys;
      note(n);
    }
  }

  /// Keys or values of a block, once their buffer is free.
  template <int kChunks, int kChunkColumns>
  __device__ __forceinline__ void fetch(const Ring<kStages>& ring, std::uint32_t item,
                                        const ptx::TensorMap& map, const Source& source, int dim,
                                        const LoadRows& keys, int first_column) const {
    ring.claim(item);
    if constexpr (K.any_layout) {
      copy_rows<K.block_n, kCopyingThreads>(
          ring.buffer(item), dim, kChunks, [&](int row, const std::uint16_t*& from) {
            return row < keys.valid && find_slot(from, source, p.cache, keys, row);
          });
      ptx::fence_proxy_async();
      ring.announce(item, 0);
    } else {
      fill<false, K.block_n, kChunkColumns>(ring, item, map, source, dim, kChunks, keys, false, 0,
                                            first_column);
    }
  }

  /// Values of a block that lie in tiles: whole panels. Behind a sequence's last tile its last
  /// panel comes again: what lay in the buffer before may be NaN, and times a weight of 0 it still
  /// is.
  __device__ __forceinline__ void fetch_panels(std::uint32_t item) const {
    constexpr std::uint32_t kBytes = core::ValueTiles{K.head_dim_v}.panel_bytes();
    buffers.v.claim(item);
    const std::uint32_t full = buffers.v.announce(item, S::kVBytes), to = buffers.v.buffer(item);
    if (panels_ >= S::kPanels) {
      ptx::bulk_load(to, panel_, S::kVBytes, full);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < S::kPanels; ++i) {
      ptx::bulk_load(to + i * kBytes, panel_ + core::min(i, panels_ - 1) * kBytes, kBytes, full);
    }
  }
  /// The values whose keys were asked for last, if any: they follow one block behind.
  __device__ __forceinline__ void load_values() {
    if (waiting_.row < 0) return;
    if constexpr (S::kEightBit) {
      fetch_panels(item_ - 1);
    } else {
      fetch<S::kChunksV, S::kChunkColumnsV>(buffers.v, item_ - 1, p.v, p.v_source, p.head_dim_v,
                                            waiting_, buffers.first_column_v());
    }
    waiting_.row = -1;
  }

  std::uint32_t item_ = 0;            ///< next in the ring of K
  LoadRows waiting_ = {-1, 0, 0, 0};  ///< keys whose values come next
  const char* panel_ = nullptr;       ///< the same where they lie in tiles: the first
  int panels_ = 0;                    ///< that there are from it on
};

}  // namespace tessera::cuda::sm90
