// What the producers of the Hopper forward kernel (forward_producer.h, forward_pages.h) tell the
// consumers: which tiles this block computes, and each tile's queries.
#pragma once

#include "cuda/sm90/forward_buffers.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/sm90/load.h"

namespace tessera::cuda::sm90 {

/// kPaged: a warp runs it, not one thread.
template <core::Kernel K, bool kPaged>
class TileProducer {
 protected:
  using S = ForwardShape<K>;
  /// A tile, the queries that its rows are of, and the blocks of keys that they see.
  struct Found {
    core::Sequence sequence;
    Tile tile;
    core::Range queries, blocks;
    int head_k;
  };

  __device__ __forceinline__ TileProducer(const ForwardParams& params,
                                          const ForwardBuffers<K>& shared)
      : p(params), buffers(shared) {}

  /// The next tile of this block, or cluster; false: there are no more.
  __device__ __forceinline__ bool next(core::Work& work) {
    // Made anew for every tile where there are no registers to keep them in.
    constexpr bool kAnew = kPaged || S::kEightBit;
    const auto anew = [](std::uint32_t x) { return kAnew ? ptx::opaque(x) : x; };
    const auto turn = [&] {
      return core::WorkOrder::index_of(turn_++, static_cast<int>(anew(blockIdx.x / K.cluster)),
                                       static_cast<int>(anew(gridDim.x / K.cluster)));
    };
    const auto take = [&] {
      return p.next_tile == nullptr ? turn()
                                    : static_cast<int>(gridDim.x) + atomicAdd(p.next_tile, 1);
    };
    int index = 0;
    if constexpr (!kPaged && core::takes_tiles(K)) {
      if (turn_ == 0) {
        taken_ = turn();
      } else if (schedules_apart(K)) {
        taken_ = take();
      }
      index = __shfl_sync(1, taken_, 0);  // the compiler now knows it to be the same for the warp
      // A tile is asked for while there is another one to do: the answer takes its time.
      if constexpr (!schedules_apart(K)) taken_ = take();
    } else {
      index = turn();
    }
    core::WorkOrder order = p.work;
    order.batch = static_cast<int>(anew(static_cast<std::uint32_t>(order.batch)));
    if (index >= order.count<int>()) return false;
    work = order.at(index);
    return true;
  }

  /// False: its sequence has no such rows.
  __device__ __forceinline__ bool find(const core::Work& work, Found& found) const {
    core::Sequence& sequence = found.sequence;
    sequence = p.sequences.at(work.batch);
    p.cache.place(sequence);
    const int first_row = work.block * K.block_m;
    const int row_count = sequence.seqlen_q << p.rows.shift;
    if (first_row >= row_count) return false;

    Tile& tile = found.tile;
    tile.first_row = first_row;
    tile.head = work.head;
    tile.batch = work.batch;
    tile.band = p.window.band_of(sequence);
    found.queries = p.rows.queries_of({first_row, core::min(first_row + K.block_m, row_count)});
    found.blocks = core::key_blocks(tile.band, found.queries, K.block_n).seen;
    tile.blocks_end = found.blocks.end;
    return true;
  }

  /// Where a tile's results go.
  __device__ __forceinline__ void place_results(Tile& tile, const core::Sequence& sequence) const {
    const int shift = p.rows.shift, first_head = tile.head << shift;
    if constexpr (S::kEightBit) tile.first_q = sequence.first_q;
    tile.o = sequence.query_offset(p.o_strides, 0, first_head);
    tile.softmax_lse = sequence.lse_index(p.lse_head, p.work.heads << shift, first_head, 0);
  }

  /// A tile's queries.
  __device__ __forceinline__ LoadRows queries_of(const Found& found) const {
    return rows_of(found.sequence, found.queries.begin, found.tile.head << p.rows.shift);
  }
  /// Keys of a tile's n-th block.
  __device__ __forceinline__ LoadRows keys_at(const Found& found, int n) const {
    LoadRows keys = keys_of(found.sequence, n * K.block_n, found.head_k);
    keys.batch = found.sequence.entry_k;
    return keys;
  }

  /// What is to be loaded for a tile.
  __device__ __forceinline__ TileLoads loads_of(const Found& found) const {
    TileLoads loads;
    loads.queries = queries_of(found);
    loads.keys = keys_at(found, 0);
    loads.blocks = found.blocks;
    if constexpr (S::kEightBit) {
      constexpr core::ValueTiles kTiles = {K.head_dim_v};
      const core::Sequence& sequence = found.sequence;
      loads.panels = static_cast<const char*>(p.v_source.data) +
                     sequence.entry_k * p.v_source.strides.batch +
                     found.head_k * p.v_source.strides.head +
                     core::ValueTiles::first_of(sequence) * kTiles.tile_bytes();
      loads.panel_count = core::ceil_div(sequence.seqlen_k, core::ValueTiles::kKeys) *
                          (core::ValueTiles::kKeys / core::ValueTiles::kPanelKeys);
    }
    return loads;
  }

  /// Says what a share of a tile is, once its buffer of queries is free.
  __device__ __forceinline__ void describe(const Found& found, int share) {
    const core::Range blocks = found.blocks;
    [[maybe_unused]] Shared shared;
    // Without keys there may be none. They take their time, so they are asked for while the buffer
    // is waited for; where it gets free early there is time after that, and fewer registers are
    // needed.
    if (S::kScaled && !S::kSparesQueries && !blocks.empty()) shared = scales_of(found);
    buffers.q.claim(q_item_);
    if constexpr (S::kEightBit) keep_last();
    if (S::kScaled && S::kSparesQueries && !blocks.empty()) shared = scales_of(found);
    if (!leads()) return;
    Order<K>& order = buffers.order(q_item_);
    order.tile = found.tile;
    if constexpr (kPaged) place_results(order.tile, found.sequence);
    if constexpr (S::kScaled) {
      TileScales& scales = buffers.scales(q_item_);
      scales.q = scale_factor<K>(p) * shared.q;
      scales.first_k = shared.k;
      scales.v = shared.v;
      scales.k = p.k_scale.of(found.sequence, found.head_k);
    }
    for (int i = share; i < share + S::kGroups / S::kShares; ++i) {
      order.walks[i].blocks =
          blocks.empty() ? core::KeyBlocks{} : walk_of(found.tile, p.rows, blocks, i);
    }
  }
  /// The queries of a share that has been described, of the tile's.
  __device__ __forceinline__ void load_queries(LoadRows rows, bool exist, int share) {
    const int before = share * K.q_rows >> p.rows.shift;
    rows.row += before;
    rows.valid -= before;
    if (!exist) {
      announce_queries();
    } else if (!kPaged || leads()) {
      fill<K.any_layout, K.q_rows, S::kChunkColumns>(buffers.q, q_item_, p.q, p.q_source,
                                                     p.head_dim, S::kChunks, rows, p.rows.shift > 0,
                                                     0, buffers.first_column());
    }
    ++q_item_;
  }

  /// Says that there are no more tiles.
  __device__ __forceinline__ void describe_end() const {
    buffers.q.claim(q_item_);
    if constexpr (S::kEightBit) keep_last();
    if (leads()) buffers.order(q_item_).tile.first_row = -1;
  }

  /// Speaks for the producer.
  __device__ __forceinline__ static bool leads() {
    return (!K.any_layout && !kPaged) || threadIdx.x == 0;
  }

  const ForwardParams& p;
  const ForwardBuffers<K>& buffers;
  std::uint32_t q_item_ = 0;  ///< next in the ring of Q

 private:
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

  /// Scales that tiles share.
  struct Shared {
    float q = 1.0F, k = 1.0F, v = 1.0F;
  };
  /// Those of a tile whose head_k is known.
  __device__ __forceinline__ Shared scales_of(const Found& found) const {
    const core::Sequence& sequence = found.sequence;
    Shared shared;
    if (p.q_scale.by != Scaling::token) shared.q = p.q_scale.of(sequence, found.head_k)[0];
    shared.k = p.k_scale.of(sequence, found.head_k)[0];
    if (S::kEightBit && (p.v_scale.by == Scaling::tensor || p.v_scale.by == Scaling::head)) {
      shared.v = p.v_scale.of(sequence, found.head_k)[0];
    }
    return shared;
  }
  /// What the next item says of the tile before, of which the one before speaks.
  __device__ __forceinline__ void keep_last() const {
    const std::uint32_t before = q_item_ - S::kShares;
    const TileScales& its = buffers.scales(before);
    TileScales& scales = buffers.scales(q_item_);
    const Tile& tile = buffers.order(before).tile;
    const bool empty = buffers.order(before).walks[q_item_ % S::kShares].blocks.seen.empty();
    scales.last_v = empty ? its.last_v : its.v;
    scales.last_head = empty ? its.last_head : tile.head;
    scales.last_batch = empty ? its.last_batch : tile.batch;
    scales.last_first_q = empty ? its.last_first_q : tile.first_q;
    scales.last_o = empty ? its.last_o : tile.o;
    scales.last_softmax_lse = empty ? its.last_softmax_lse : tile.softmax_lse;
  }

  /// An item of Q without queries.
  __device__ __forceinline__ void announce_queries() const {
    if (!kPaged || leads()) buffers.q.announce(q_item_, 0);
  }

  int turn_ = 0;   ///< how many tiles the block has looked for
  int taken_ = 0;  ///< index of the next one, where it is known early
};

}  // namespace tessera::cuda::sm90
