// Tiles of a consumer of the Hopper forward kernel (forward.h): how it gets them, takes turns with
// the others and lets buffers go, which query and head each of its rows is, and where their results
// go.
#pragma once

#include "cuda/ptx/memory.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward_buffers.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::sm90 {

/// A thread has two rows of a tile, its half-th (of two).
template <core::Kernel K>
class ForwardRows {
 protected:
  using S = ForwardShape<K>;

  __device__ __forceinline__ ForwardRows(const ForwardParams& params,
                                         const ForwardBuffers<K>& shared, int group)
      : p(params),
        buffers(shared),
        group_(group),
        warp_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        leads_(threadIdx.x % 128 == 0),
        q_item_(S::kShares == 1 ? ~0U : static_cast<std::uint32_t>(group - S::kShares)) {}

  // ---- tiles ----

  /// The next tile that sees a key, and the blocks that are this warpgroup's; those tiles on the
  /// way that see none get their zeros. Its queries are there.
  __device__ __forceinline__ bool next_tile(Tile& t, core::KeyBlocks& own) {
    take_order(t, own);
#pragma unroll 1
    while (agreed(t.first_row >= 0 && own.seen.empty())) {
      write_zeros(t);
      ptx::barrier_sync(1 + S::kGroups + group_, 128);
      if (leads_) buffers.q.release(q_item_);
      take_order(t, own);
    }
    if (agreed(t.first_row < 0)) return false;
    hold_queries();
    return true;
  }

  __device__ __forceinline__ void take_order(Tile& t, core::KeyBlocks& own) {
    q_item_ += S::kShares;
    buffers.q.wait_full(q_item_);
    const Order<K>& order = buffers.order(q_item_);
    t = order.tile;
    own = order.walks[group_].blocks;
    // Also of a ring of one: descriptors kept from the start would take registers from the loops.
    q_descriptor_ = ptx::opaque(ptx::descriptor_along(buffers.operand(queries())));
  }

  /// This warpgroup's queries in shared memory.
  __device__ __forceinline__ std::uint32_t queries() const {
    return buffers.q.buffer(q_item_) + (S::kShares == 1 ? group_ * kRows * 128 : 0);
  }

  /// Every step's operand: 16 rows of a warp and 32 bytes of columns, in units of 16.
  __device__ __forceinline__ void hold_queries() {
    if constexpr (S::kHoldsQueries) {
      const std::uint32_t row = warp_ * 16 + lane_ % 16, line = queries() + row * 128;
#pragma unroll
      for (int i = 0; i < S::kDim / S::kStepColumns; ++i) {
        const std::uint32_t unit = (i % 4 * 2 + lane_ / 16) ^ row % 8;
        ptx::load_matrices(queries_ + 4 * i, line + i / 4 * K.q_rows * 128 + unit * 16);
      }
    }
  }

  // ---- who issues ----

  __device__ __forceinline__ void begin_issue() const { ptx::barrier_sync(1 + group_, 256); }
  __device__ __forceinline__ void end_issue() const {
    ptx::barrier_arrive(1 + (group_ + 1) % S::kGroups, 256);
  }

  // ---- buffers ----

  /// Keys of item_; and with a tile's last ones its queries, if the next tile's wait for their
  /// buffer: values that clear_values() waits for come after those.
  __device__ __forceinline__ void release_keys(bool last_of_tile) const {
    if (leads_) {
      buffers.k.release(item_);
      if (!S::kSparesQueries && last_of_tile) buffers.q.release(q_item_);
    }
  }
  /// Queries of a tile whose scores are all there, if nobody waits for them: asking in every step
  /// whether it is the last one costs 1 % at d = 64.
  __device__ __forceinline__ void release_queries() const {
    if (S::kSparesQueries && leads_) buffers.q.release(q_item_);
  }

  // ---- blocks of the tile that lie beyond this warpgroup's diagonal ----

  // A block passed by is waited for all the same, so that its buffer is not released before all are
  // done with what lay there; and released only when the whole warpgroup has looked: whoever looks
  // after it has been filled anew waits for ever.

  /// Lets keys pass by, and with them this warpgroup's times to issue.
  __device__ __forceinline__ void skip_keys(int count) {
#pragma unroll 1
    for (; agreed(count > 0); --count) {
      ++item_;
      buffers.k.wait_full(item_);
      begin_issue();
      if (leads_) buffers.k.release(item_);
      end_issue();
    }
  }
  /// Lets the values of the `count` blocks before item_ pass by.
  __device__ __forceinline__ void skip_values(int count) const {
#pragma unroll 1
    for (; agreed(count > 0); --count) {
      buffers.v.wait_full(item_ - count);
      ptx::barrier_sync(1 + S::kGroups + group_, 128);
      if (leads_) buffers.v.release(item_ - count);
    }
  }

  // ---- values ----

  /// Values beyond the end of a packed sequence, where another one lies, or of one in a cache,
  /// where anything may lie, become 0: their weights are 0, but that times infinity is not. Every
  /// warpgroup clears them for itself. Values beyond the end of a tensor are 0 as they come.
  __device__ __forceinline__ void clear_values(const Tile& t, const core::KeyBlocks& own,
                                               std::uint32_t item) const {
    if constexpr (!K.any_layout && !S::kEightBit) {
      const int valid = t.band.seqlen_k - (own.seen.end - 1) * K.block_n;
      if (agreed(!p.strangers || valid >= K.block_n)) return;
      buffers.v.wait_full(item);
      const std::uint32_t v = buffers.v.buffer(item);
      constexpr std::uint32_t kZeros[4] = {};
      // Softcap at d = 256 has no register left to keep the second form in.
      const int thread = K.extra == core::Extra::softcap ? warp_ * 32 + lane_
                                                         : static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
      for (int i = valid * 8 + thread; i < K.block_n * 8; i += 128) {
        for (int c = 0; c < S::kChunksV; ++c)
          ptx::store_shared(v + (c * K.block_n * 8 + i) * 16, kZeros);
      }
      ptx::fence_proxy_async();
      ptx::barrier_sync(1 + S::kGroups + group_, 128);
    }
  }

  // ---- rows and results ----

  __device__ __forceinline__ int row_in_tile(int half) const {
    return group_ * kRows + warp_ * 16 + static_cast<int>(lane_anew()) / 4 + 8 * half;
  }
  __device__ __forceinline__ int row_of(const Tile& t, int half) const {
    return t.first_row + row_in_tile(half);
  }

  __device__ __forceinline__ int query_of(const Tile& t, int half) const {
    return p.rows.query_of(row_of(t, half));
  }

  /// Rows that see no key (S4); with a sink its logit is all the denominator.
  __device__ __forceinline__ void write_zeros(const Tile& t) const {
    const float lse = p.sink == nullptr ? -core::kInfinity : p.sink[t.head];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = row_exists(t, half);
      store_lse(t, half, exists, lse);
      std::uint16_t* const to = output_of(t, half);
      const int end = exists ? columns() - store_column(lane_anew()) : 0;
      for (int c = 0; c < S::kDimV; c += 16) {
        store_columns<K.any_layout>(c, end, to + c, 0, 0);
      }
    }
  }

  __device__ __forceinline__ bool row_exists(const Tile& t, int half) const {
    return query_of(t, half) < t.band.seqlen_q;
  }
  /// The row's query head, counted from the tile's first one.
  __device__ __forceinline__ int member_of(const Tile& t, int half) const {
    return p.rows.member_of(row_of(t, half));
  }
  __device__ __forceinline__ int head_of(const Tile& t, int half) const {
    return (t.head << p.rows.shift) + member_of(t, half);
  }
  __device__ __forceinline__ void store_lse(const Tile& t, int half, bool exists, float x) const {
    const bool writes = is_eight_bit(K) ? lane_anew() % 4 == 0 : lane_ % 4 == 0;
    ptx::store_if(
        exists && p.softmax_lse != nullptr && writes && buffers.block() == 0,
        p.softmax_lse + t.softmax_lse + member_of(t, half) * p.lse_head + query_of(t, half), x);
  }
  __device__ __forceinline__ std::uint16_t* output_of(const Tile& t, int half) const {
    return static_cast<std::uint16_t*>(p.o) + t.o + query_of(t, half) * p.o_strides.seqlen +
           member_of(t, half) * p.o_strides.head + buffers.first_column_v() +
           store_column(lane_anew());
  }
  /// A row of O, times that.
  template <int kAll>
  __device__ __forceinline__ void store(const Tile& t, int half, bool exists,
                                        const float (&o)[kAll], float factor) const {
    std::uint16_t* const to = output_of(t, half);
    if constexpr (S::kEightBit) {
      // Not two ways to store: what they have in common would have no registers.
      store_row<S::kDimV, false>(o, half, factor, exists, lane_anew(), columns(), to,
                                 [&](float a, float b) {
                                   const std::uint32_t f16 = ptx::pack<Dtype::f16>(a, b);
                                   return p.o_is_f16 ? f16 : ptx::pack<Dtype::bf16>(a, b);
                                 });
    } else {
      store_row<S::kType, K.any_layout>(o, half, factor, exists, lane_, columns(), to);
    }
  }
  /// Columns of o that exist from this block's first on.
  __device__ __forceinline__ int columns() const { return p.head_dim_v - buffers.first_column_v(); }
  /// The lane where results go. Of 8 bits the compiler must not know it: it would keep all that
  /// follows from it through the loops, which have no register left.
  __device__ __forceinline__ std::uint32_t lane_anew() const {
    const auto lane = static_cast<std::uint32_t>(lane_);
    return is_eight_bit(K) ? ptx::opaque(lane) : lane;
  }

  const ForwardParams& p;
  const ForwardBuffers<K>& buffers;
  const int group_;  ///< of the consumers
  const int warp_;   ///< of the warpgroup
  const int lane_;
  const bool leads_;  ///< arrives at barriers for its warpgroup

  std::uint32_t item_ = ~0U;  ///< in the ring of K: whose scores come next
  std::uint32_t weighed_ =
      ~0U;  ///< in the ring of V: whose weights are the operand, still to be multiplied
  std::uint32_t q_item_;        ///< in the ring of Q
  std::uint32_t q_descriptor_;  ///< of this warpgroup's queries in it
  /// As operands, or unused.
  std::uint32_t queries_[S::kHoldsQueries ? S::kDim / S::kStepColumns * 4 : 1];
};

}  // namespace tessera::cuda::sm90
