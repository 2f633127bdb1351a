// The producing thread of the Hopper forward kernel: it decides which tiles this block computes,
// tells the consumers, and asks the copy engine for what they read.
#pragma once

#include "cuda/ptx/memory.h"
#include "cuda/sm90/buffers.h"
#include "cuda/sm90/params.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
class Producer {
  using S = Shape<K>;

 public:
  __device__ __forceinline__ Producer(const ForwardParams& params, const Buffers<K>& shared)
      : p(params), buffers(shared) {}

  __device__ __forceinline__ void run() {
    const int workers = static_cast<int>(gridDim.x), worker = static_cast<int>(blockIdx.x);
    for (int i = 0, index;
         (index = core::TileOrder::index_of(i, worker, workers)) < p.order.count(); ++i) {
      produce(index);
    }
    load_values();
    buffers.q.claim(q_item_);
    buffers.order(q_item_).tile.first_row = -1;
    buffers.q.announce(q_item_, 0);
  }

 private:
  /// The tile at `index` of the order.
  __device__ __forceinline__ void produce(int index) {
    const core::TileOrder::Tile place = p.order.at(index);
    const int head = place.head % p.heads, batch = place.head / p.heads;
    const bool packed = p.cu_seqlens_q != nullptr;
    int seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k, first_q = 0, first_k = 0;
    if (packed) {
      first_q = p.cu_seqlens_q[batch];
      first_k = p.cu_seqlens_k[batch];
      seqlen_q = p.cu_seqlens_q[batch + 1] - first_q;
      seqlen_k = p.cu_seqlens_k[batch + 1] - first_k;
    }
    const int first_row = place.row_block * K.block_m;
    if (first_row >= seqlen_q) return;

    Tile tile;
    tile.first_row = first_row;
    tile.head = head;
    tile.batch = batch;
    tile.band = core::make_band(seqlen_q, seqlen_k, p.window_left, p.window_right, p.alignment);
    const core::Range rows = {first_row, core::min(first_row + K.block_m, seqlen_q)};
    const core::Range blocks = core::key_blocks(tile.band, rows, K.block_n).seen;
    tile.blocks_end = blocks.end;
    const std::int64_t row = first_q + first_row;
    tile.o = (packed ? 0 : batch * p.o_strides.batch) + head * p.o_strides.head +
             row * p.o_strides.seqlen;
    tile.softmax_lse =
        packed ? head * p.total_q + row : (std::int64_t{batch} * p.heads + head) * p.seqlen_q + row;

    buffers.q.claim(q_item_);
    Order<K>& order = buffers.order(q_item_);
    order.tile = tile;
    for (int group = 0; group < S::kGroups; ++group) {
      order.walks[group].blocks = blocks.empty() ? core::KeyBlocks{} : walk_of(tile, blocks, group);
    }
    const std::uint32_t q_full = buffers.q.announce(q_item_, blocks.empty() ? 0 : S::kQBytes);
    if (!blocks.empty()) {
      load(p.q, buffers.q.buffer(q_item_), q_full, S::kChunks, K.block_m, first_q + first_row, head,
           packed ? 0 : batch);
    }
    ++q_item_;
    for (int n = blocks.end - 1; n >= blocks.begin; --n, ++item_) {
      buffers.k.claim(item_);
      const std::uint32_t k_full = buffers.k.announce(item_, S::kKBytes);
      const Keys keys = {first_k + n * K.block_n, head / p.group, packed ? 0 : batch};
      load(p.k, buffers.k.buffer(item_), k_full, S::kChunks, K.block_n, keys.row, keys.head,
           keys.batch);
      load_values();
      waiting_ = keys;
    }
  }

  /// Blocks that a warpgroup of the tile walks over: all but the rightmost one if its rows do not
  /// see that. Not two: the second one's values lie where those still to be multiplied are.
  __device__ __forceinline__ static core::KeyBlocks walk_of(const Tile& tile, core::Range blocks,
                                                            int group) {
    // Rows past the sequence's end go with its last one.
    const int first = core::min(tile.first_row + group * kRows, tile.band.seqlen_q - 1);
    const core::Range rows = {first, core::min(first + kRows, tile.band.seqlen_q)};
    const core::KeyBlocks own = core::key_blocks(tile.band, rows, K.block_n);
    const int least = core::max(blocks.end - kStages + 1, blocks.begin + 1);
    return {{blocks.begin, core::max(own.seen.end, least)}, own.full};
  }

  /// The values whose keys were asked for last, if any: they follow one block behind.
  __device__ __forceinline__ void load_values() {
    if (waiting_.row < 0) return;
    const std::uint32_t i = item_ - 1;
    buffers.v.claim(i);
    load(p.v, buffers.v.buffer(i), buffers.v.announce(i, S::kVBytes), S::kChunksV, K.block_n,
         waiting_.row, waiting_.head, waiting_.batch);
  }

  __device__ __forceinline__ static void load(const ptx::TensorMap& map, std::uint32_t to,
                                              std::uint32_t barrier, int chunks, int rows, int row,
                                              int head, int batch) {
    for (int c = 0; c < chunks; ++c) {
      ptx::tma_load(to + c * rows * 128, map, barrier, c * kColumns, row, head, batch);
    }
  }

  /// A block of keys, or of their values.
  struct Keys {
    int row, head, batch;
  };

  const ForwardParams& p;
  const Buffers<K>& buffers;
  std::uint32_t q_item_ = 0;  ///< next in the ring of Q
  std::uint32_t item_ = 0;    ///< next in the ring of K
  Keys waiting_ = {-1, 0, 0};
};

}  // namespace tessera::cuda::sm90
