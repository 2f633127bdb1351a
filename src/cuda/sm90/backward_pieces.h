// What becomes of the pieces of dQ that consumers of the Hopper backward kernel make (backward.h):
// the copy engine adds them to sums in memory, and where all blocks of keys have added theirs, the
// sums become dQ. Both go on beside the products, in warps of the producing warpgroup.
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/sm90/backward_buffers.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/piece.h"

namespace tessera::cuda::sm90 {

/// Has the copy engine add what a consuming warpgroup hands over: a thread does so all the time, so
/// no consumer waits until its stores can be seen.
struct PieceAdder {
  const BackwardParams& p;
  const PieceOrder* orders;  ///< by item
  std::uint32_t from;        ///< the piece, in shared memory
  int group;                 ///< of the consumers

  __device__ __forceinline__ void run(const Ring<1>& sums) const {
    std::int32_t* before = nullptr;  // the turn of the item before, if that has not been passed
    for (std::uint32_t item = 0;; ++item) {
      sums.wait_full(item);
      const std::int64_t index = orders[item % kPieceOrders].index;
      if (index < 0) break;
      const int rank = orders[item % kPieceOrders].rank;
      std::int32_t* const turn = p.turns + index * 2 + group;
      if (p.in_order) {
        while (ptx::load_acquire(turn) != rank) {
        }
        ptx::fence_proxy_async_global();
      }
      float* const to = p.rows.dq_at(index) + group * kPieceFloats;
      ptx::fence_proxy_async();
      if (p.in_order && rank == 0) {
        ptx::bulk_store(to, from, kSumBytes);  // what is there has not been made 0
      } else {
        ptx::bulk_add(to, from, kSumBytes);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read();
      sums.release(item);
      if (p.in_order) {
        ptx::bulk_wait();
        pass(turn);
      } else {
        // Nobody is held up by it: it has the time of a step to arrive.
        ptx::bulk_wait<1>();
        if (before != nullptr) pass(before);
        before = turn;
      }
    }
    ptx::bulk_wait();
    if (before != nullptr) pass(before);
  }

  /// What has been added is seen by those who see the turn.
  __device__ __forceinline__ static void pass(std::int32_t* turn) {
    ptx::fence_proxy_async_global();
    ptx::add_release(turn, 1);
  }
};

/// Makes dQ from its sums. Row blocks are shared out evenly among the blocks of threads, in the
/// order in which they get complete. A warp does so beside the products; what is left of the share
/// when there are no more tiles is taken by the consumers, too.
template <core::Kernel K>
class PieceFinisher {
  using S = BackwardShape<K>;
  static constexpr bool kByRows = K.block_m == 128;  ///< a piece is half the rows, not the columns

 public:
  __device__ __forceinline__ PieceFinisher(const BackwardParams& params,
                                           const BackwardBuffers<K>& shared)
      : p(params), buffers(shared), block_(shared.words->finishing), lane_(threadIdx.x % 32) {}

  /// A warp.
  __device__ __forceinline__ void run() {
    for (;;) {
      int taken = 0;
      if (lane_ == 0) taken = atomicAdd(&buffers.words->finished, 1);
      const int index = index_of(__shfl_sync(~0U, taken, 0));
      if (index >= p.row_work.count<int>()) break;
      const FinishedRows block = describe(index);
      if (block.rows <= 0) continue;
      if (lane_ == 0) block_ = block;
      __syncwarp();
      write();
    }
  }

  /// A consuming warpgroup.
  __device__ __forceinline__ void help(int group) {
    for (;;) {
      ptx::barrier_sync(2 + group, 128);
      if (threadIdx.x % 128 == 0) {
        buffers.words->taken[group] = atomicAdd(&buffers.words->finished, 1);
      }
      ptx::barrier_sync(2 + group, 128);
      const int index = index_of(buffers.words->taken[group]);
      if (index >= p.row_work.count<int>()) break;
      const FinishedRows block = describe(index);
      if (block.rows <= 0) continue;
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const int row = kByRows ? piece * kRows : 0, column = kByRows ? 0 : piece * kColumns;
        finish_piece<S::kType, false>(
            block.sums + piece * kPieceFloats, static_cast<int>(threadIdx.x) % 128, p.score.scale,
            block.rows - row, p.head_dim - column, block.to + row * p.dq_strides.seqlen + column,
            p.dq_strides.seqlen);
      }
    }
  }

 private:
  /// The taken-th of this block's share.
  __device__ __forceinline__ int index_of(int taken) const {
    return static_cast<int>(blockIdx.x) + taken * p.workers;
  }

  /// Returns when the row block is complete.
  __device__ __forceinline__ FinishedRows describe(int index) const {
    const core::Work work = p.row_work.at(index);
    const int row_block = p.row_work.blocks - 1 - work.block;
    const core::Sequence sequence = p.sequences.at(work.batch);
    const int first_row = row_block * K.block_m;
    const int rows = core::min(sequence.seqlen_q - first_row, K.block_m);
    if (rows <= 0) return {};
    const core::Band band = p.window.band_of(sequence);
    const int adders = core::key_blocks(band, {first_row, first_row + rows}, K.block_n).seen.size();
    const core::RowBlocks blocks = {K.block_m, p.rows.blocks.per_sequence};
    const std::int64_t at = p.rows.index_of(blocks.first_of(sequence) + row_block, work.head);
    while (ptx::load_acquire(p.turns + at * 2 + lane_ % 2) != adders) ptx::sleep(50);
    __syncwarp();
    ptx::fence_proxy_async_global();
    const std::int64_t first = sequence.query_offset(p.dq_strides, first_row, work.head);
    return {p.rows.dq + at * 2 * kPieceFloats, static_cast<std::uint16_t*>(p.dq) + first, rows};
  }

  /// Twice as many quarters of pieces as there are buffers for them.
  __device__ __forceinline__ void write() const {
    for (int i = 0; i < kQuarters; ++i) fetch(i);
#pragma unroll 1
    for (int i = 0; i < 2 * kQuarters; ++i) {
      buffers.returned.wait_full(i);
      const int row = kByRows ? i / kQuarters * kRows : 0;
      const int column = (kByRows ? i % kQuarters : i) * 16;
      write_quarter(buffers.returned.buffer(i), block_.rows - row, p.head_dim - column,
                    block_.to + row * p.dq_strides.seqlen + column);
      __syncwarp();
      if (i < kQuarters) fetch(i + kQuarters);
    }
  }
  __device__ __forceinline__ void fetch(std::uint32_t i) const {
    if (lane_ != 0) return;
    ptx::bulk_load(buffers.returned.buffer(i), block_.sums + i * (kPieceFloats / kQuarters),
                   kQuarterBytes, buffers.returned.announce(i, kQuarterBytes));
  }
  /// 16 columns of 64 rows, of which so many exist; the former in eights. As latency is what
  /// counts, lanes exchange nothing for the sake of wider stores.
  __device__ __forceinline__ void write_quarter(std::uint32_t from, int rows, int columns,
                                                std::uint16_t* to) const {
    from += lane_ * 16;
    rows -= static_cast<int>(lane_ / 4);
    to += lane_ / 4 * p.dq_strides.seqlen + lane_ % 4 * 2;
#pragma unroll 2
    for (int warp = 0; warp < 4; ++warp) {  // that had the rows in its registers
      float a[4], b[4];
      ptx::load_shared(from + warp * 512, a[0], a[1], a[2], a[3]);
      ptx::load_shared(from + warp * 512 + 2048, b[0], b[1], b[2], b[3]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto* const words = reinterpret_cast<std::uint32_t*>(to);
        ptx::store_if(rows > 0 && columns > 0, words, pack(a[2 * half], a[2 * half + 1]));
        ptx::store_if(rows > 0 && columns > 8, words + 4, pack(b[2 * half], b[2 * half + 1]));
        rows -= 8;
        to += 8 * p.dq_strides.seqlen;
      }
    }
  }
  __device__ __forceinline__ std::uint32_t pack(float a, float b) const {
    return ptx::pack<S::kType>(a * p.score.scale, b * p.score.scale);
  }

  const BackwardParams& p;
  const BackwardBuffers<K>& buffers;
  volatile FinishedRows& block_;  ///< the warp's; read where it is needed: registers are scarce
  const std::uint32_t lane_;
};

}  // namespace tessera::cuda::sm90
