// The producer of the Hopper backward kernel: it decides which blocks of keys this block computes,
// tells the consumers, and fills the buffers that they read.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/sm90/backward_buffers.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/load.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
class BackwardProducer {
  using S = BackwardShape<K>;
  static constexpr int kCopyingBarrier = 1;  ///< of the producer's threads

 public:
  __device__ __forceinline__ BackwardProducer(const BackwardParams& params,
                                              const BackwardBuffers<K>& shared)
      : p(params), buffers(shared) {}

  __device__ __forceinline__ void run() {
    const int count = p.work.count<int>();
    for (int index = next(); index < count; index = next()) produce(piece(index));
    buffers.k.claim(tile_item_);
    if (leads()) {
      buffers.words->tile.first_key = -1;
      if constexpr (!splits_roles(K)) buffers.words->pieces[item_ % kPieceOrders].index = -1;
    }
    buffers.k.announce(tile_item_, 0);
  }

 private:
  __device__ __forceinline__ core::Work piece(int index) const {
    if constexpr (core::begins_early(K)) return p.work.backward_at(index);
    return p.work.at_with_splits(index);
  }

  /// The next tile that nobody has taken: tiles of unequal length are handed out as blocks get
  /// free. The first one, too: whoever waits for another block's sums must not wait for one that
  /// has not begun because somebody else's kernel has its multiprocessor.
  __device__ __forceinline__ int next() {
    if constexpr (K.cluster > 1) return hand_on();
    int index = 0;
    if (leads()) index = atomicAdd(p.next_tile, 1);
    if constexpr (K.any_layout) {
      buffers.k.claim(tile_item_);  // also: everybody has read the last tile's description
      if (leads()) buffers.words->tile.item = index;
      ptx::barrier_sync(kCopyingBarrier, kCopyingThreads);
      index = buffers.words->tile.item;
      ptx::barrier_sync(kCopyingBarrier, kCopyingThreads);
      return index;
    }
    return __shfl_sync(1, index, 0);  // the compiler now knows it to be the same for the warp
  }

  /// The same of a cluster: its first block takes a tile, and tells the other one.
  __device__ __forceinline__ int hand_on() {
    const std::uint32_t place = ptx::shared_address(&buffers.words->handed);
    std::uint32_t index = 0;
    if (buffers.block() == 0) {
      index = static_cast<std::uint32_t>(atomicAdd(p.next_tile, 1));
      ptx::mbarrier_wait(buffers.handed_empty, handed_ ^ 1);
      ptx::store_async(ptx::address_in(1, place), index, ptx::address_in(1, buffers.handed_full));
    } else {
      ptx::mbarrier_expect(buffers.handed_full, sizeof index);
      ptx::mbarrier_wait(buffers.handed_full, handed_);
      index = ptx::load_shared(place);
      ptx::mbarrier_arrive_there(ptx::address_in(0, buffers.handed_empty));
    }
    handed_ ^= 1;
    return static_cast<int>(__shfl_sync(1, index, 0));
  }

  /// A block of keys.
  __device__ __forceinline__ void produce(const core::Work& work) {
    const core::Sequence sequence = p.sequences.at(work.batch);
    const int first_key = p.work.key_block(work, p.in_order) * K.block_n;
    if (first_key >= sequence.seqlen_k) return;
    const int own_key = first_key + buffers.first_own_key();

    KeyTile tile;
    tile.first_key = own_key;
    tile.head = work.head;
    tile.batch = work.batch;
    tile.entry = sequence.entry();
    tile.band = p.window.band_of(sequence);
    tile.queries = core::query_blocks(tile.band, {first_key, first_key + K.block_n}, K.block_m);
    if constexpr (core::begins_early(K)) {
      tile.walk = core::row_walk(tile.queries.seen, work.early);
      tile.queries = tile.walk.places_of(tile.queries);
      keep_walk(tile.walk);
    }
    const core::RowBlocks row_blocks = {K.block_m, p.rows.blocks.per_sequence};
    tile.first_block = row_blocks.first_of(sequence);
    tile.first_row = sequence.first_k;
    const core::RowSteps steps =
        core::row_steps(tile.queries.seen, p.group, work.split, p.work.splits);
    tile.steps = steps.count;
    if (steps.count > 0) {
      tile.first_step = steps.at(0);
      tile.last_step = steps.at(steps.count - 1);
    }
    tile.split = work.split;
    tile.item = tile_item_;
    tile.k = buffers.operand(buffers.k.buffer(tile_item_));
    tile.v = buffers.operand(buffers.v.buffer(tile_item_));

    const LoadRows keys = keys_of(sequence, own_key, work.head);
    // Keys come when those of the tile before are done with. Where consumers give V back before,
    // what else the first step takes is asked for before.
    constexpr bool kKeysFirst = splits_roles(K);
    if (kKeysFirst || tile.steps == 0) load_keys(tile, keys);
    if (tile.steps == 0) load_values(keys);
    int query_head = work.head * p.group + tile.first_step.member, place = tile.first_step.block;
    for (int step = 0; step < tile.steps; ++step, ++item_) {
      const int m = walk().block_at(place);
      const LoadRows rows = rows_of(sequence, m * K.block_m, query_head);
      const float* const statistics = p.rows.statistics_of(tile.first_block + m, query_head);
      buffers.q.claim(item_);
      if (leads()) order_piece(tile, query_head, m);
      std::uint32_t full =
          fill<K.any_layout, K.block_m>(buffers.q, item_, p.q, p.q_source, p.head_dim, S::kChunks,
                                        rows, false, S::kStatisticBytes, buffers.first_column());
      if (leads()) ptx::bulk_load(buffers.shifts_of(item_), statistics, S::kStatisticBytes, full);
      if (step == 0) load_values(keys);
      buffers.dout.claim(item_);
      full = fill<K.any_layout, K.block_m>(buffers.dout, item_, p.dout, p.dout_source, p.head_dim_v,
                                           S::kChunksV, rows, false, S::kStatisticBytes,
                                           buffers.first_column_v());
      if (leads()) {
        ptx::bulk_load(buffers.deltas_of(item_), statistics + K.block_m, S::kStatisticBytes, full);
      }
      if (!kKeysFirst && step == 0) load_keys(tile, keys);
      if (++place == tile.queries.seen.end) {
        place = tile.queries.seen.begin;
        ++query_head;
      }
    }
    ++tile_item_;
  }

  /// Says where the item's dQ goes.
  __device__ __forceinline__ void order_piece(const KeyTile& tile, int query_head, int m) const {
    PieceOrder& order = buffers.words->pieces[item_ % kPieceOrders];
    order.index = p.rows.index_of(tile.first_block + m, query_head);
    if (p.in_order) {
      const core::Range rows = {m * K.block_m, core::min((m + 1) * K.block_m, tile.band.seqlen_q)};
      order.rank = walk().rank_of(core::key_blocks(tile.band, rows, K.block_n).seen,
                                  tile.first_key / K.block_n);
    }
  }

  /// K, and what is said of the tile.
  __device__ __forceinline__ void load_keys(const KeyTile& tile, const LoadRows& keys) const {
    buffers.k.claim(tile_item_);
    if (leads()) buffers.words->tile = tile;
    const std::uint32_t full =
        fill<K.any_layout, S::kKeys>(buffers.k, tile_item_, p.k, p.k_source, p.head_dim, S::kChunks,
                                     keys, false, S::kOtherBytes, buffers.first_column());
    if constexpr (exchanges(K)) {
      const int row = keys.row - buffers.first_own_key() + buffers.first_other_key();
      for (int c = 0; c < S::kChunks / 2; ++c) {
        ptx::tma_load(buffers.other_keys + c * S::kKeys * 128, p.k, full,
                      (buffers.block() * S::kChunks / 2 + c) * kColumns, row, keys.head,
                      keys.batch);
      }
    }
  }
  __device__ __forceinline__ void load_values(const LoadRows& keys) const {
    buffers.v.claim(tile_item_);
    fill<K.any_layout, S::kKeys>(buffers.v, tile_item_, p.v, p.v_source, p.head_dim_v, S::kChunksV,
                                 keys, false, 0, buffers.first_column_v());
  }

  // Of the tile whose rows are loaded: there are no registers to keep it in.
  __device__ __forceinline__ void keep_walk(const core::RowWalk& walk) const {
    volatile core::RowWalk& kept = buffers.words->walk;
    kept.flip = walk.flip;
    kept.base = walk.base;
  }
  __device__ __forceinline__ core::RowWalk walk() const {
    if constexpr (!core::begins_early(K)) return {};
    const volatile core::RowWalk& kept = buffers.words->walk;
    return {kept.flip, kept.base};
  }

  /// Speaks for the producer.
  __device__ __forceinline__ static bool leads() { return !K.any_layout || threadIdx.x == 0; }

  const BackwardParams& p;
  const BackwardBuffers<K>& buffers;
  std::uint32_t tile_item_ = 0;  ///< next in the rings of K and V
  std::uint32_t item_ = 0;       ///< next in the rings of Q and dO
  std::uint32_t handed_ = 0;     ///< parity of the tile that is handed on next
};

}  // namespace tessera::cuda::sm90
