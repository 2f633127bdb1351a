// The backward pass on Hopper (Shah et al. 2024, section 3; Dao 2023, algorithm 2): a block of keys
// after another on a grid of one block per multiprocessor; dK and dV of a block of keys stay in
// registers while it walks over all rows that see it, those of every query head of its group.
//
// Warpgroup 0 produces (backward_producer.h). The other two consume, 64 keys each. All products
// that they sum have keys as rows, so that weights are register operands as they lie:
//   S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q
// and dS^T goes through shared memory, where both meet, for dQ += dS K, each half of it. dQ is
// summed in fp32 in global memory, and made from its sums, beside the products (backward_pieces.h).
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/backward_buffers.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/backward_pieces.h"
#include "cuda/sm90/backward_producer.h"
#include "cuda/sm90/piece.h"
#include "cuda/sm90/products.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
class BackwardConsumer {
  using S = BackwardShape<K>;
  using ScoreWgmma = ptx::Wgmma<S::kType, K.block_m>;
  using KeyWgmma = ptx::Wgmma<S::kType, K.head_dim>;
  using ValueWgmma = ptx::Wgmma<S::kType, K.head_dim_v>;
  using QueryWgmma = ptx::Wgmma<S::kType, 64>;
  static constexpr int kM = K.block_m;
  static constexpr int kN = K.block_n;
  static constexpr std::uint32_t kValuesAfterKeys = buffer_bytes(K.head_dim, K.block_n);

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams& params,
                                              const BackwardBuffers<K>& shared, int group)
      : p(params),
        buffers(shared),
        group_(group),
        warp_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        lane_(threadIdx.x % 32),
        leads_(threadIdx.x % 128 == 0) {}

  __device__ __forceinline__ void run() {
    if (group_ == 1) end_issue();
    for (std::uint32_t item = 0;;) {
      buffers.k.wait_full(item);
      if (!agreed(tile().first_key >= 0)) break;
      clear_accumulators();
      buffers.v.wait_full(item);
      clear_keys();
      const int steps = tile().steps;
      if (agreed(steps > 0)) walk();
      const KeyTile done = tile();
      item = done.item;
      release_keys(item++);
      if (steps > 0) {
        add_queries(item_ - 1);
      } else {
        release_values();
      }
      write(done);
      // The compiler takes lanes for parted from here on if nobody tells it, and fetches every
      // descriptor from registers of their own.
      __syncwarp();
    }
    end_of_queries();
  }

 private:
  // ---- tiles ----

  /// Read where it is needed: registers are scarce.
  __device__ __forceinline__ const KeyTile& tile() const { return buffers.words->tile; }

  /// All have read the tile's description: with its keys the next one's may come.
  __device__ __forceinline__ void release_keys(std::uint32_t item) const {
    ptx::barrier_sync(2 + group_, 128);
    buffers.k.release_if(leads_, item);
  }
  /// Whose item it is does not matter: there is one buffer.
  __device__ __forceinline__ void release_values() const { buffers.v.release_if(leads_, 0); }

  __device__ __forceinline__ void clear_accumulators() {
#pragma unroll
    for (int i = 0; i < K.head_dim / 2; ++i) dk_[i] = 0.0F;
#pragma unroll
    for (int i = 0; i < K.head_dim_v / 2; ++i) dv_[i] = 0.0F;
  }

  // Rows beyond the end of a packed sequence, where another one lies, become 0: their weights are
  // 0, but that times infinity is not. Every warpgroup clears them for itself. Rows beyond the end
  // of a tensor are 0 as they come.

  __device__ __forceinline__ void after_clearing() const {
    ptx::fence_proxy_async();
    ptx::barrier_sync(2 + group_, 128);
  }
  __device__ __forceinline__ void clear_keys() const {
    const int valid = tile().band.seqlen_k - tile().first_key;
    if (agreed(!p.sequences.packed() || valid >= kN)) return;
    clear_rows<kN>(tile().k, S::kChunks, valid);
    clear_rows<kN>(tile().v, S::kChunksV, valid);
    after_clearing();
  }
  __device__ __forceinline__ void clear_queries(int m) const {
    const int valid = tile().band.seqlen_q - block_at(m) * kM;
    if (agreed(!p.sequences.packed() || valid >= kM)) return;
    buffers.dout.wait_full(item_);
    clear_rows<kM>(buffers.q.buffer(item_), S::kChunks, valid);
    clear_rows<kM>(buffers.dout.buffer(item_), S::kChunksV, valid);
    after_clearing();
  }

  /// All blocks of rows that see the keys, of every query head. The last step is apart: no scores
  /// follow it.
  __device__ __forceinline__ void walk() {
    step_ = 0;
    const bool passes =
        kM < kN && agreed(tile().steps > 1 && hides(block_at(tile().first_step.block)));
    if (passes) pass_by();
    begin_scores();
    const core::QueryBlocks& blocks = tile().queries;
    int m = tile().first_step.block;
    int member = tile().first_step.member;
    if (passes && ++m == blocks.seen.end) {
      m = blocks.seen.begin;
      ++member;
    }
    for (;; ++member) {
      const int end = tile().end_of(member);
      while (m < end) {
        const int masked_end = m < blocks.full.begin ? core::min(blocks.full.begin, end)
                               : m < blocks.full.end ? m
                                                     : end;
#pragma unroll 1
        for (; m < masked_end; ++m) step<true, false>(m);
        const int full_end = core::min(blocks.full.end, end);
#pragma unroll 1
        for (; m < full_end; ++m) step<false, false>(m);
      }
      if (agreed(member == tile().last_step.member)) break;
      m = blocks.seen.begin;
    }
    step<true, true>(m);
    ptx::wgmma_results(dk_);
    ptx::wgmma_results(dv_);
  }

  /// The block of rows at a place of the walk.
  __device__ __forceinline__ int block_at(int m) const { return tile().walk.block_at(m); }

  // A tile's first rows are hidden from the second warpgroup's keys, if a causal mask ends between
  // them: it has half a step less to do.

  /// Does the mask hide all of a block of rows from this warpgroup's keys?
  __device__ __forceinline__ bool hides(int m) const {
    const core::Band& band = tile().band;
    const int first = tile().first_key + group_ * kRows;
    const core::Range rows = band.queries_of({first, core::min(first + kRows, band.seqlen_k)});
    return first >= band.seqlen_k || rows.begin >= (m + 1) * kM || rows.end <= m * kM;
  }
  /// Lets a step pass by: dS is 0, and dQ is made of it with the next step's.
  __device__ __forceinline__ void pass_by() {
    buffers.q.wait_full(item_);
    buffers.dout.wait_full(item_);
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) dscores_[i] = 0;
    store_scores();
    begin_issue();  // as all have seen that the buffers were full
    end_issue();
    buffers.dout.release_if(leads_, item_);
    buffers.q.release_if(leads_, item_);
    ++item_;
    ++step_;
  }

  // ---- a block of rows ----

  // The warpgroups issue products one after the other: while one multiplies, the other is at its
  // exponentials.
  __device__ __forceinline__ void begin_issue() const { ptx::barrier_sync(4 + group_, 256); }
  __device__ __forceinline__ void end_issue() const { ptx::barrier_arrive(4 + (group_ ^ 1), 256); }

  // A step begins with its scores and their gradients there, and ends with those of the next one.
  // dQ is issued one step late: by then the other warpgroup has its half of dS there, and nobody
  // waits. Between is one wait for all that is under way: what dQ and dV are multiplied from are
  // the registers that the next dP^T takes, and the compiler knows of no part of a wait.

  /// Scores and gradients of the tile's first step.
  __device__ __forceinline__ void begin_scores() {
    buffers.q.wait_full(item_);
    k_ = tile().k;
    issue_scores<K.head_dim>(s_, k_, buffers.q.buffer(item_));
    issue_gradients(item_);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(dp_);
    ptx::wgmma_results(s_);
  }

  template <bool kMasked, bool kLast>
  __device__ __forceinline__ void step(int m) {
    if constexpr (kLast) release_values();
    if constexpr (kMasked) clear_queries(m);
    make_scores<kMasked>(m);
    make_operands();
    store_scores();
    begin_issue();
    issue_values();
    // Of a tile's first step this is nothing: a branch around products makes the compiler wait.
    if (step_ > 0) buffers.scores.wait_full(item_ - 1);
    issue_queries(item_ - 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(dq_);
    buffers.dout.release_if(leads_, item_);
    buffers.scores.release_if(leads_ && step_ > 0, item_ - 1);
    if (step_ > 0) add_queries(item_ - 1);
    issue_keys();
    if constexpr (kLast) {
      end_issue();
      buffers.scores.wait_full(item_);
      issue_queries(item_);
      ptx::wgmma_wait<1>();
      buffers.q.release_if(leads_, item_);
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(dq_);
      buffers.scores.release_if(leads_, item_);
    } else {
      buffers.q.wait_full(item_ + 1);
      issue_scores<K.head_dim>(s_, k_, buffers.q.buffer(item_ + 1));
      if constexpr (kM == 128) ptx::wgmma_wait<1>();
      issue_gradients(item_ + 1);
      ptx::wgmma_wait<2>();
      buffers.q.release_if(leads_, item_);
      end_issue();
      k_ = tile().k;
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(dp_);
      ptx::wgmma_results(s_);
    }
    ++item_;
    ++step_;
  }

  /// S^T becomes P^T, and dP^T dS^T.
  template <bool kMasked>
  __device__ __forceinline__ void make_scores(int m) {
    float x[kM / 4];
    load_statistics(x, buffers.shifts_of(item_));
#pragma unroll
    for (int i = 0; i < kM / 2; ++i) {
      s_[i] = ptx::ex2(fmaf(s_[i], p.score.pre, -x[i / 4 * 2 + i % 2]));
    }
    if constexpr (kMasked) mask(m, s_);
    load_statistics(x, buffers.deltas_of(item_));
#pragma unroll
    for (int i = 0; i < kM / 2; ++i) dp_[i] = s_[i] * (dp_[i] - x[i / 4 * 2 + i % 2]);
    // A weight of 0 times what a row of another sequence gave may be anything.
    if (kMasked && agreed(p.sequences.packed())) mask(m, dp_);
  }

  /// D = A B^T of this warpgroup's 64 keys and a block of rows.
  template <int kDim>
  __device__ __forceinline__ void issue_scores(float (&d)[kM / 2], std::uint32_t keys,
                                               std::uint32_t rows) const {
    multiply_along<ScoreWgmma, kN, kM, kDim>(d, ptx::descriptor_along(keys + group_ * kRows * 128),
                                             ptx::descriptor_along(rows));
  }

  /// dP^T of an item.
  __device__ __forceinline__ void issue_gradients(std::uint32_t item) {
    buffers.dout.wait_full(item);
    issue_scores<K.head_dim_v>(dp_, k_ + kValuesAfterKeys, buffers.dout.buffer(item));
  }

  /// dV += P^T dO.
  __device__ __forceinline__ void issue_values() {
    add_across<ValueWgmma, kM>(dv_, weights_,
                               ptx::descriptor_across(buffers.dout.buffer(item_), kM * 128));
  }

  /// dK += dS^T Q.
  __device__ __forceinline__ void issue_keys() {
    add_across<KeyWgmma, kM>(dk_, dscores_,
                             ptx::descriptor_across(buffers.q.buffer(item_), kM * 128));
  }

  /// A piece of dQ = dS K: 64 columns of 64 rows, or all 64 of half of 128 rows.
  __device__ __forceinline__ void issue_queries(std::uint32_t item) {
    const int chunk_of_rows = kM == 128 ? group_ : 0, chunk_of_columns = kM == 128 ? 0 : group_;
    const std::uint32_t a =
        ptx::descriptor_across(buffers.scores.buffer(item) + chunk_of_rows * kN * 128, kN * 128);
    const std::uint32_t b = ptx::descriptor_across(k_ + chunk_of_columns * kN * 128, kN * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      QueryWgmma::shared_across(dq_, ptx::descriptor(a + i * 16 * 128 / 16),
                                ptx::descriptor(b + i * 16 * 128 / 16), i != 0);
    }
    ptx::wgmma_commit();
  }

  /// Of the thread's columns, in pairs.
  __device__ __forceinline__ void load_statistics(float (&x)[kM / 4], std::uint32_t from) const {
#pragma unroll
    for (int c = 0; c < kM / 8; ++c) {
      ptx::load_shared(from + lane_ % 4 * 8 + c * 32, x[2 * c], x[2 * c + 1]);
    }
  }

  /// What the mask hides becomes 0.
  __device__ __forceinline__ void mask(int m, float (&x)[kM / 2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = key_of(tile().first_key, half);
      const int first = block_at(m) * kM + static_cast<int>(lane_ % 4 * 2);
      core::Range rows = tile().band.queries_of({key, key + 1});
      if (key >= tile().band.seqlen_k) rows = {0, 0};
      mask_row(x, half, {rows.begin - first, rows.end - first}, 0.0F);
    }
  }

  /// P^T and dS^T in the storage type.
  __device__ __forceinline__ void make_operands() {
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) {
      weights_[i] = ptx::pack<S::kType>(s_[2 * i], s_[2 * i + 1]);
      dscores_[i] = ptx::pack<S::kType>(dp_[2 * i], dp_[2 * i + 1]);
    }
  }

  /// dS^T to shared memory: a row a key, 16-byte units of eight rows of Q, in the 128-byte swizzle.
  __device__ __forceinline__ void store_scores() const {
    buffers.scores.claim(item_);
    const std::uint32_t row = group_ * kRows + warp_ * 16 + lane_ % 16;
    const std::uint32_t to =
        buffers.scores.buffer(item_) + row * 128 + (lane_ / 16 ^ lane_ % 8) * 16;
#pragma unroll
    for (int j = 0; j < kM / 16; ++j) {
      ptx::store_matrices((to ^ j % 4 * 32) + j / 4 * kN * 128, dscores_ + 4 * j);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    buffers.scores.arrive_full_if(lane_ == 0, item_);
  }

  /// Hands an item's piece of dQ to the thread that has it added to memory (PieceAdder).
  __device__ __forceinline__ void add_queries(std::uint32_t item) const {
    const Ring<1> sums = buffers.sums_of(group_);
    sums.claim(item);
    const std::uint32_t to = sums.data + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      ptx::store_shared(to + i * 2048, dq_[4 * i], dq_[4 * i + 1], dq_[4 * i + 2], dq_[4 * i + 3]);
    }
    __syncwarp();
    sums.arrive_full_if(lane_ == 0, item);
  }
  /// No more come.
  __device__ __forceinline__ void end_of_queries() const {
    const Ring<1> sums = buffers.sums_of(group_);
    sums.claim(item_);
    __syncwarp();
    sums.arrive_full_if(lane_ == 0, item_);
  }

  // ---- results ----

  /// The thread's half-th key (of two).
  __device__ __forceinline__ int key_of(int first_key, int half) const {
    return first_key + group_ * kRows + fragment_row(warp_, lane_, half);
  }

  __device__ __forceinline__ std::uint16_t* row_of(void* tensor, const core::Strides& strides,
                                                   const KeyTile& t, int half) const {
    const std::int64_t row = t.first_row + key_of(t.first_key, half);
    return static_cast<std::uint16_t*>(tensor) + t.entry * strides.batch + t.head * strides.head +
           row * strides.seqlen + store_column(lane_);
  }

  /// Where others have steps of the same keys: their sums, and whose they are, are told apart.
  __device__ __forceinline__ void write_sums(const KeyTile& t) const {
    float* const to = p.key_sums.at(t.batch, t.head, t.first_key / kN, t.split);
    const int thread = static_cast<int>(threadIdx.x) % 128;
    store_pieces(dv_, to + group_ * S::kChunksV * kPieceFloats, thread);
    store_pieces(dk_, to + (p.key_sums.pieces_of_dv + group_ * S::kChunks) * kPieceFloats, thread);
  }

  __device__ __forceinline__ void write(const KeyTile& t) const {
    if (agreed(p.key_sums.data != nullptr)) return write_sums(t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = key_of(t.first_key, half) < t.band.seqlen_k;
      store_row<S::kType, false>(dv_, half, 1.0F, exists, lane_, p.head_dim_v,
                                 row_of(p.dv, p.dv_strides, t, half));
      store_row<S::kType, false>(dk_, half, p.score.scale, exists, lane_, p.head_dim,
                                 row_of(p.dk, p.dk_strides, t, half));
    }
  }

  const BackwardParams& p;
  const BackwardBuffers<K>& buffers;
  const int group_;  ///< of the consumers
  const int warp_;   ///< of the warpgroup
  const std::uint32_t lane_;
  const bool leads_;  ///< arrives at barriers for its warpgroup

  std::uint32_t item_ = 0;  ///< in the rings of Q and dO
  int step_ = 0;            ///< of the tile
  std::uint32_t k_ = 0;     ///< shared address of K, read anew for every step (KeyTile)
  float s_[kM / 2], dp_[kM / 2], dq_[32];
  std::uint32_t weights_[kM / 4], dscores_[kM / 4];
  float dk_[K.head_dim / 2], dv_[K.head_dim_v / 2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void backward(const BackwardParams& p, char* shared) {
  using S = BackwardShape<K>;
  const BackwardBuffers<K> buffers(shared);
  // Told to be the same for the whole warp.
  const int group = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) buffers.initialise();
  __syncthreads();
  if (group == 0) {
    ptx::lower_registers<S::kProducerRegisters>();
    const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 1 || warp == 2) {
      const int consumer = warp - 1;
      const Ring<1> sums = buffers.sums_of(consumer);
      if (threadIdx.x % 32 == 0) {
        PieceAdder{p, buffers.words->pieces, sums.data, consumer}.run(sums);
      }
    } else if (warp == 3) {
      PieceFinisher<K>(p, buffers).run();
    } else if (threadIdx.x < S::kProducers) {
      BackwardProducer<K>(p, buffers).run();
    }
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    BackwardConsumer<K>(p, buffers, group - 1).run();
    PieceFinisher<K>(p, buffers).help(group - 1);
  }
}

}  // namespace tessera::cuda::sm90
