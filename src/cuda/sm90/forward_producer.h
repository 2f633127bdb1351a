// The producer of the Hopper forward kernel: it decides which tiles this block computes, tells the
// consumers, and fills the buffers that they read. One thread asks the copy engine to, or, where
// keys lie in pages, all threads of a warpgroup (forward_pages.h); in rows that take any layout a
// warpgroup does it by itself, all threads on the same way.
#pragma once

#include "cuda/sm90/forward_pages.h"

namespace tessera::cuda::sm90 {

/// kPaged: keys lie in pages, and the whole warpgroup runs it.
template <core::Kernel K, bool kPaged>
class ForwardProducer {
  using S = ForwardShape<K>;

 public:
  __device__ __forceinline__ ForwardProducer(const ForwardParams& params,
                                             const ForwardBuffers<K>& shared)
      : p(params), buffers(shared), boxes_(params) {}

  __device__ __forceinline__ void run() {
    for (int i = 0;; ++i) {
      // kPaged: made anew for every tile, as there are no registers to keep them in.
      const auto anew = [](std::uint32_t x) { return kPaged ? ptx::opaque(x) : x; };
      const int index = core::WorkOrder::index_of(i, static_cast<int>(anew(blockIdx.x)),
                                                  static_cast<int>(anew(gridDim.x)));
      core::WorkOrder work = p.work;
      work.batch = static_cast<int>(anew(static_cast<std::uint32_t>(work.batch)));
      if (index >= work.count<int>()) break;
      produce(work.at(index));
    }
    load_values();
    for (int share = 0; share < S::kShares; ++share) {
      claim_queries();
      if (leads()) buffers.order(q_item_).tile.first_row = -1;
      announce_queries();
      ++q_item_;
    }
  }

 private:
  /// A tile.
  __device__ __forceinline__ void produce(const core::Work& work) {
    core::Sequence sequence = p.sequences.at(work.batch);
    p.cache.place(sequence);
    const int first_row = work.block * K.block_m;
    const int shift = p.rows.shift, row_count = sequence.seqlen_q << shift;
    if (first_row >= row_count) return;

    Tile tile;
    tile.first_row = first_row;
    tile.head = work.head;
    tile.batch = work.batch;
    tile.band = p.window.band_of(sequence);
    const core::Range queries =
        p.rows.queries_of({first_row, core::min(first_row + K.block_m, row_count)});
    const core::Range blocks = core::key_blocks(tile.band, queries, K.block_n).seen;
    tile.blocks_end = blocks.end;
    const int first_head = work.head << shift;
    tile.o = sequence.query_offset(p.o_strides, 0, first_head);
    tile.softmax_lse = sequence.lse_index(p.lse_head, p.work.heads << shift, first_head, 0);

    const LoadRows rows = rows_of(sequence, queries.begin, first_head);
    // Consumers may wait for values before they look at the next tile; with keys theirs come in
    // time.
    if (blocks.empty()) {
      load_values();
      for (int share = 0; share < S::kShares; ++share) hand_out(tile, rows, blocks, share);
    }
    const auto keys_at = [&](int n) {
      LoadRows keys = keys_of(sequence, n * K.block_n, work.head / p.group);
      keys.batch = sequence.entry_k;
      return keys;
    };
    int page = kPaged && !blocks.empty() ? boxes_.look_up(keys_at(blocks.end - 1)) : 0;
    for (int n = blocks.end - 1; n >= blocks.begin; --n, ++item_) {
      const bool first = n == blocks.end - 1;
      const LoadRows keys = keys_at(n);
      buffers.k.claim(item_);
      fetch(buffers.k, item_, p.k, p.k_source, p.head_dim, S::kChunks, keys, page);
      // In the order in which they are wanted: the first warpgroup is ahead of the others.
#pragma unroll 1
      for (int share = 0; share == 0 || (first && share < S::kShares); ++share) {
        if (first) hand_out(tile, rows, blocks, share);
        if (share == 0) load_values();
      }
      waiting_ = keys;
      if constexpr (kPaged) {
        waiting_page_ = page;
        // Page numbers come while the next buffer is waited for.
        if (n > blocks.begin) page = boxes_.look_up(keys_at(n - 1));
      }
    }
  }

  /// Keys or values of a block, into a buffer that has been claimed.
  __device__ __forceinline__ void fetch(const Ring<kStages>& ring, std::uint32_t item,
                                        const ptx::TensorMap& map, const Source& source, int dim,
                                        int chunks, const LoadRows& keys, int page) const {
    if constexpr (kPaged) {
      // Whoever is ahead of the thread that announces the bytes takes them away before.
      if (leads()) ring.announce(item, ring.bytes);
      boxes_.fetch(ring.buffer(item), ring.full_barrier(item), map, chunks, keys, page);
    } else if constexpr (K.any_layout) {
      copy_rows<K.block_n, kCopyingThreads>(
          ring.buffer(item), dim, chunks, [&](int row, const std::uint16_t*& from) {
            return row < keys.valid && find_slot(from, source, p.cache, keys, row);
          });
      ptx::fence_proxy_async();
      ring.announce(item, 0);
    } else {
      fill<false, K.block_n>(ring, item, map, source, dim, chunks, keys);
    }
  }

  /// A share of a tile: what it is, and its queries, of the tile's `rows`.
  __device__ __forceinline__ void hand_out(const Tile& tile, LoadRows rows, core::Range blocks,
                                           int share) {
    claim_queries();
    if (leads()) {
      Order<K>& order = buffers.order(q_item_);
      order.tile = tile;
      for (int i = share; i < share + S::kGroups / S::kShares; ++i) {
        order.walks[i].blocks =
            blocks.empty() ? core::KeyBlocks{} : walk_of(tile, p.rows, blocks, i);
      }
    }
    if (blocks.empty()) {
      announce_queries();
    } else {
      const int before = share * K.q_rows >> p.rows.shift;
      rows.row += before;
      rows.valid -= before;
      if (!kPaged || leads()) {
        fill<K.any_layout, K.q_rows>(buffers.q, q_item_, p.q, p.q_source, p.head_dim, S::kChunks,
                                     rows, p.rows.shift > 0);
      }
    }
    ++q_item_;
  }

  /// Blocks that a warpgroup of the tile walks over: all but the rightmost one if its rows do not
  /// see that. Not two: the second one's values lie where those still to be multiplied are.
  __device__ __forceinline__ static core::KeyBlocks walk_of(const Tile& tile,
                                                            core::ShiftedRows shifted,
                                                            core::Range blocks, int group) {
    const int row_count = tile.band.seqlen_q << shifted.shift;
    // Rows past the sequence's end go with its last one.
    const int first = core::min(tile.first_row + group * kRows, row_count - 1);
    const core::Range rows = {first, core::min(first + kRows, row_count)};
    const core::KeyBlocks own = core::key_blocks(tile.band, shifted.queries_of(rows), K.block_n);
    const int least = core::max(blocks.end - kStages + 1, blocks.begin + 1);
    return {{blocks.begin, core::max(own.seen.end, least)}, own.full};
  }

  /// The values whose keys were asked for last, if any: they follow one block behind.
  __device__ __forceinline__ void load_values() {
    if (waiting_.row < 0) return;
    buffers.v.claim(item_ - 1);
    fetch(buffers.v, item_ - 1, p.v, p.v_source, p.head_dim_v, S::kChunksV, waiting_,
          waiting_page_);
    waiting_.row = -1;
  }

  /// kPaged: all warps wait for each other, as tiles without keys may follow each other: whoever
  /// looks after a buffer has been filled and read again waits for ever.
  __device__ __forceinline__ void claim_queries() const {
    buffers.q.claim(q_item_);
    if constexpr (kPaged) boxes_.meet();
  }
  /// An item of Q without queries.
  __device__ __forceinline__ void announce_queries() const {
    if (!kPaged || leads()) buffers.q.announce(q_item_, 0);
  }

  /// Speaks for the producer.
  __device__ __forceinline__ static bool leads() {
    return (!K.any_layout && !kPaged) || threadIdx.x == 0;
  }

  const ForwardParams& p;
  const ForwardBuffers<K>& buffers;
  std::uint32_t q_item_ = 0;          ///< next in the ring of Q
  std::uint32_t item_ = 0;            ///< next in the ring of K
  LoadRows waiting_ = {-1, 0, 0, 0};  ///< keys whose values come next
  int waiting_page_ = 0;              ///< kPaged: of the lane's box of them
  const PageBoxes<K> boxes_;
};

}  // namespace tessera::cuda::sm90
