// The producer of the Hopper forward kernel: it decides which tiles this block computes, tells the
// consumers, and fills the buffers that they read. One thread asks the copy engine to; in rows that
// take any layout a warpgroup does it by itself, all threads on the same way. Where keys lie in
// pages, warps do (forward_pages.h).
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

template <core::Kernel K>
class ForwardProducer : TileProducer<K, false> {
  using Base = TileProducer<K, false>;
  using Base::buffers;
  using Base::p;
  using typename Base::S;

 public:
  __device__ __forceinline__ ForwardProducer(const ForwardParams& params,
                                             const ForwardBuffers<K>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    core::Work work;
    while (Base::next(work)) produce(work);
    load_values();
    Base::finish();
  }

 private:
  /// A tile.
  __device__ __forceinline__ void produce(const core::Work& work) {
    typename Base::Found found;
    if (!Base::find(work, found)) return;
    Base::place_results(found.tile, found.sequence);
    const LoadRows rows = Base::queries_of(found);
    // Consumers may wait for values before they look at the next tile; with keys theirs come in
    // time.
    if (found.blocks.empty()) {
      load_values();
      for (int share = 0; share < S::kShares; ++share) Base::hand_out(found, rows, share);
    }
    found.head_k = p.group.quotient(work.head);
    for (int n = found.blocks.end - 1; n >= found.blocks.begin; --n, ++item_) {
      const bool first = n == found.blocks.end - 1;
      const LoadRows keys = Base::keys_at(found, n);
      fetch<S::kChunks, S::kChunkColumns>(buffers.k, item_, p.k, p.k_source, p.head_dim, keys,
                                          buffers.first_column());
      // In the order in which they are wanted: the first warpgroup is ahead of the others.
#pragma unroll 1
      for (int share = 0; share == 0 || (first && share < S::kShares); ++share) {
        if (first) Base::hand_out(found, rows, share);
        if (share == 0) load_values();
      }
      waiting_ = keys;
      if constexpr (S::kEightBit) find_panels(found, n);
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
  /// Where a tile's n-th block has its panels, and how many its sequence has from there on.
  __device__ __forceinline__ void find_panels(const typename Base::Found& found, int n) {
    constexpr core::ValueTiles kTiles = {K.head_dim_v};
    const core::Sequence& sequence = found.sequence;
    panel_ = static_cast<const char*>(p.v_source.data) +
             sequence.entry_k * p.v_source.strides.batch + found.head_k * p.v_source.strides.head +
             core::ValueTiles::first_of(sequence) * kTiles.tile_bytes() +
             n * (S::kPanels * kTiles.panel_bytes());
    panels_ = core::ceil_div(sequence.seqlen_k, core::ValueTiles::kKeys) *
                  (core::ValueTiles::kKeys / core::ValueTiles::kPanelKeys) -
              n * S::kPanels;
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
