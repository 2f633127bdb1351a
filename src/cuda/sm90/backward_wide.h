// The backward pass on Hopper for head dims above 128, where dK and dV of 64 keys do not fit the
// registers of one warpgroup, and for rows of the catalog with extras, which need them for more:
// each of the two that consume has one of them. What a block of threads does otherwise is as in
// backward.h, with tiles of 64 keys and steps of 64 rows.
//
//   values:  S^T = K Q^T    P^T = exp2(S^T)             dV += P^T dO    dQ += dS K, first columns
//   keys:    dP^T = V dO^T  dS^T = P^T (dP^T - delta)   dK += dS^T Q    dQ += dS K, the others
//
// P^T goes from the values' registers to the keys' through shared memory, in fp32; dS^T goes to
// both, as an operand. A step of either begins with its scores (S^T or dP^T) there:
//
//   values:  P^T, hand over, issue dV and the next S^T, wait for dS^T, dQ
//   keys:    wait for P^T, dS^T, hand over, issue dK and the next dP^T, dQ
//
// so that one multiplies while the other is at its scores: dV and the next S^T are under way while
// dS^T is made, dK and the next dP^T while the values are at their next P^T. The last piece of dQ
// is left under way, too, until the next step has handed over.
//
// Rows of the catalog with extras do one thing after another; the scores' derivatives go with P^T.
// Of wider heads two blocks of threads share a tile (pair.h), and sum S^T and dP^T (score_sums.h).
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/backward_buffers.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/backward_producer.h"
#include "cuda/sm90/backward_turns.h"
#include "cuda/sm90/piece.h"
#include "cuda/sm90/products.h"
#include "cuda/sm90/score_sums.h"
#include "cuda/tile/backward_extras.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::sm90 {

enum class Role : std::uint8_t { values, keys };

/// The "sum" is dV or dK, "scores" are S^T, then P^T, or dP^T, then dS^T.
template <core::Kernel K, Role kRole>
class WideConsumer {
  using S = BackwardShape<K>;
  static constexpr bool kValues = kRole == Role::values;
  static constexpr bool kExtras = K.extra == core::Extra::all;
  static constexpr int kM = K.block_m, kN = K.block_n;
  static constexpr int kScoreDim = kValues ? S::kDim : S::kDimV;
  static constexpr int kSumDim = kValues ? S::kDimV : S::kDim;
  static constexpr int kSumChunks = kValues ? S::kChunksV : S::kChunks;
  // Pieces of dQ: the keys, who wait for the values, take the odd one.
  static constexpr int kFirstPiece = kValues ? 0 : S::kChunks / 2;
  static constexpr int kLastPiece = (kValues ? S::kChunks / 2 : S::kChunks) - 1;
  using ScoreWgmma = ptx::Wgmma<S::kType, kM>;
  using SumWgmma = ptx::Wgmma<S::kType, kSumDim>;
  using QueryWgmma = ptx::Wgmma<S::kType, 64>;

  /// Where dO has one buffer, it is given back as soon as it has been multiplied, and the keys,
  /// who wait for the next one, leave all else under way before.
  static constexpr bool kOneDout = !kExtras && dout_stages(K) == 1;
  static constexpr bool kScoresLate = kOneDout && !kValues;

  // Named barriers. Two order all that the warpgroups hand over. Who passes kWeightsReady of a step
  // knows that the values are done with dQ of the step before the last, so that dS^T, in two
  // buffers, may be written; who passes kScoresReady knows that P^T has been read. The producer's
  // threads have the first one.
  static constexpr int kWeightsReady = 2, kScoresReady = 3;
  static constexpr int kOwn = kValues ? 4 : 5;  ///< of this warpgroup
  static constexpr int kBoth = 2 * 128;         ///< threads

  /// Whether what is said of a tile is read anew each time: registers are scarcer still, and of a
  /// pair of blocks there is none left.
  static constexpr bool kPair = K.cluster > 1;
  static constexpr bool kScarce = kPair || S::kDim + S::kDimV > 384;

  static_assert(kM == 64 && kN == 64 && (kExtras || (K.q_stages >= 2 && !K.any_layout)));

 public:
  __device__ __forceinline__ WideConsumer(const BackwardParams& params,
                                          const BackwardBuffers<K>& shared)
      : p(params),
        buffers(shared),
        warp_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        lane_(threadIdx.x % 32),
        leads_(threadIdx.x % 128 == 0),
        sums_(shared.score_sums, shared.score_sums_full, shared.other(),
              (kValues ? 0 : 4) + warp_) {}

  __device__ __forceinline__ void run() {
    while (next_tile()) {
#pragma unroll
      for (int i = 0; i < kSumDim / 2; ++i) sum_[i] = 0.0F;
      clear_keys();
      if constexpr (!kValues) buffers.v.wait_full(tile_item_);
      if (agreed(tile().steps > 0)) {
        if constexpr (kExtras) {
          walk_with_extras();
        } else {
          walk();
        }
      }
      write();
      if constexpr (kPair) __syncwarp();
    }
  }

 private:
  // ---- tiles ----

  __device__ __forceinline__ bool next_tile() {
    buffers.k.wait_full(++tile_item_);
    return agreed(tile().first_key >= 0);
  }
  /// Read where it is needed: registers are scarce.
  __device__ __forceinline__ const KeyTile& tile() const { return buffers.words->tile; }

  __device__ __forceinline__ decltype(auto) queries_of_tile() const {
    if constexpr (kScarce) {
      return (tile().queries);
    } else {
      return core::QueryBlocks(tile().queries);
    }
  }

  // What the scores are made from and what the sum is made from.
  __device__ __forceinline__ const auto& scored() const {
    if constexpr (kValues) {
      return buffers.q;
    } else {
      return buffers.dout;
    }
  }
  __device__ __forceinline__ const auto& summed() const {
    if constexpr (kValues) {
      return buffers.dout;
    } else {
      return buffers.q;
    }
  }

  // Rows beyond the end of a packed sequence, where another one lies, become 0 where weights that
  // are 0 meet them in a sum: that times infinity is not 0. Every warpgroup clears for itself what
  // it sums. Scores of such rows and keys are not used: mask() and differentiate() see to it. What
  // threads load is 0 there as it comes.

  __device__ __forceinline__ void after_clearing() const {
    ptx::fence_proxy_async();
    ptx::barrier_sync(kOwn, 128);
  }
  __device__ __forceinline__ void clear_keys() const {
    const int valid = tile().band.seqlen_k - tile().first_key;
    if (K.any_layout || agreed(!p.sequences.packed() || valid >= kN)) return;
    clear_rows<kN>(buffers.k.buffer(tile_item_), S::kChunks, valid);
    after_clearing();
  }
  __device__ __forceinline__ void clear_summed(int m) const {
    const int valid = tile().band.seqlen_q - m * kM;
    if (K.any_layout || agreed(!p.sequences.packed() || valid >= kM)) return;
    clear_rows<kM>(summed().buffer(item_), kSumChunks, valid);
    after_clearing();
  }

  /// All blocks of rows that see the keys, of every query head. The last step is apart: no scores
  /// follow it.
  __device__ __forceinline__ void walk() {
    pending_ = nullptr;
    issue_scores(item_);
    ptx::wgmma_wait<0>();
    take_scores();
    const core::QueryBlocks& blocks = queries_of_tile();
    int member = tile().first_step.member, m = tile().first_step.block;
    for (;; ++member) {
      const int kept = kPair ? 0 : end_of(member);
      const auto end = [&] { return kPair ? end_of(member) : kept; };
      while (m < end()) {
        const int masked_end = m < blocks.full.begin ? core::min(blocks.full.begin, end())
                               : m < blocks.full.end ? m
                                                     : end();
#pragma unroll 1
        for (; m < masked_end; ++m) step<true, false>(m);
        const int full_end = core::min(blocks.full.end, end());
#pragma unroll 1
        for (; m < full_end; ++m) step<false, false>(m);
      }
      if (agreed(member == tile().last_step.member)) break;
      m = blocks.seen.begin;
    }
    step<true, true>(m);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(dq_);
    add_last();
  }

  /// Where a query head's steps end, but for the last of all.
  __device__ __forceinline__ int end_of(int member) const {
    const core::RowSteps::Step& last = tile().last_step;
    return member == last.member ? last.block : tile().queries.seen.end;
  }

  // ---- a block of rows ----

  template <bool kMasked, bool kLast>
  __device__ __forceinline__ void step(int m) {
    if constexpr (kValues) {
      weigh<kMasked>(m);
      store_weights();
      ptx::barrier_arrive(kWeightsReady, kBoth);
      make_operand();
    } else {
      ptx::barrier_sync(kWeightsReady, kBoth);
      differentiate<kMasked>();
      make_operand();
      store_scores();
      ptx::fence_proxy_async();
      ptx::barrier_arrive(kScoresReady, kBoth);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(dq_);
    summed().wait_full(item_);
    if constexpr (kMasked) clear_summed(m);
    issue_sum();
    if constexpr (!kLast && !kScoresLate) issue_scores(item_ + 1);
    // Only now: the tensor cores have work again.
    if (agreed(pending_ != nullptr)) add_last();
    if constexpr (kOneDout && kValues) {
      ptx::wgmma_wait<kLast ? 0 : 1>();
      if (leads_) summed().release(item_);
    }
    // dS^T of all warps is there; and all are done with this item's scores and statistics.
    ptx::barrier_sync(kValues ? kScoresReady : kOwn, kValues ? kBoth : 128);
    if (leads_) scored().release(item_);
    pending_ = first_piece();
    issue_queries(kFirstPiece);
    if constexpr (!kOneDout || !kValues) {
      ptx::wgmma_wait<kLast || kScoresLate ? 1 : 2>();
      if (leads_) summed().release(item_);
    }
#pragma unroll
    for (int piece = kFirstPiece + 1; piece <= kLastPiece; ++piece) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(dq_);
      if (piece == kFirstPiece + 1 && p.in_order) turns().take(item_);
      add_queries(pending_, item_);
      pending_ += kPieceFloats;
      issue_queries(piece);
    }
    if constexpr (!kLast) {
      if constexpr (kScoresLate) issue_scores(item_ + 1);
      ptx::wgmma_wait<kScoresLate ? 0 : 1>();
      take_scores();
    }
    ++item_;
  }

  // ---- the same with extras: one thing after another ----

  __device__ __forceinline__ void walk_with_extras() {
    int head = tile().head * p.group + tile().first_step.member, m = tile().first_step.block;
#pragma unroll 1
    for (int left = tile().steps; left > 0; --left) {
      step_with_extras(head, m);
      if (++m == tile().queries.seen.end) {
        m = tile().queries.seen.begin;
        ++head;
      }
    }
  }

  __device__ __forceinline__ void step_with_extras(int head, int m) {
    issue_scores(item_);
    ptx::wgmma_wait<0>();
    take_scores();
    const ScorePlace place = {tile().batch,
                              head,
                              m * kM + static_cast<int>(lane_ % 4) * 2,
                              key_of(0),
                              tile().band.seqlen_q,
                              tile().band.seqlen_k};
    if constexpr (kValues) {
      transform_scores(p, place, scores_, [this](const auto& slopes) { store_slopes(slopes); });
      __syncwarp();
      weigh<true>(m);
      store_weights();
      ptx::barrier_arrive(kWeightsReady, kBoth);
      drop(p, place, scores_);
      make_operand();
    } else {
      drop(p, place, scores_);
      ptx::barrier_sync(kWeightsReady, kBoth);
      differentiate<true>();
      if (buffers.block() == 0) store_bias_gradient(p, place, scores_);
      __syncwarp();
      if (p.score.capped) multiply_slopes();
      make_operand();
      store_scores();
      ptx::fence_proxy_async();
      ptx::barrier_arrive(kScoresReady, kBoth);
    }
    summed().wait_full(item_);
    clear_summed(m);
    issue_sum();
    // As in step().
    ptx::barrier_sync(kValues ? kScoresReady : kOwn, kValues ? kBoth : 128);
    if (leads_) scored().release(item_);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(sum_);
    if (leads_) summed().release(item_);
    if (p.in_order) turns().take(item_);
    float* to = first_piece();
#pragma unroll
    for (int piece = kFirstPiece; piece <= kLastPiece; ++piece) {
      issue_queries(piece);
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(dq_);
      add_queries(to, item_);
      to += kPieceFloats;
    }
    if (p.in_order) turns().pass(item_);
    ++item_;
  }

  // The scores' derivatives lie behind P^T, as it does.

  __device__ __forceinline__ std::uint32_t slopes_place() const {
    return buffers.weights + kN * kM * 4 + threadIdx.x % 128 * 16;
  }
  __device__ __forceinline__ void store_slopes(const std::uint32_t (&slopes)[kM / 4]) const {
#pragma unroll
    for (int i = 0; i < kM / 4; i += 4) {
      ptx::store_shared(slopes_place() + i / 4 * 128 * 16,
                        {slopes[i], slopes[i + 1], slopes[i + 2], slopes[i + 3]});
    }
  }
  __device__ __forceinline__ void multiply_slopes() {
#pragma unroll
    for (int i = 0; i < kM / 4; i += 2) {
      float words[2];
      ptx::load_shared(slopes_place() + i / 4 * 128 * 16 + i % 4 * 4, words[0], words[1]);
      const std::uint32_t slopes[2] = {__float_as_uint(words[0]), __float_as_uint(words[1])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& ds = scores_[2 * i + j];
        ds = core::score_gradient(p.score, ds, slope_of(slopes, j)).product;
      }
    }
  }

  // ---- products ----

  /// A buffer, for a descriptor. Of a ring of one, too, the compiler must not know it: it would
  /// keep dozens of descriptors ready.
  template <int kStages>
  __device__ __forceinline__ std::uint32_t operand_of(const Ring<kStages>& ring,
                                                      std::uint32_t item) const {
    const std::uint32_t address = buffers.operand(ring.buffer(item));
    return kStages == 1 && !kExtras ? ptx::opaque(address) : address;
  }
  /// S^T = K Q^T or dP^T = V dO^T.
  __device__ __forceinline__ void issue_scores(std::uint32_t item) {
    scored().wait_full(item);
    multiply_along<ScoreWgmma, kN, kM, kScoreDim>(
        scores_, ptx::descriptor_along(kValues ? tile().k : tile().v),
        ptx::descriptor_along(operand_of(scored(), item)));
  }
  /// They are there, of all columns.
  __device__ __forceinline__ void take_scores() {
    ptx::wgmma_results(scores_);
    if constexpr (K.cluster > 1) sums_.add(scores_);
  }

  /// dV += P^T dO or dK += dS^T Q.
  __device__ __forceinline__ void issue_sum() {
    add_across<SumWgmma, kM>(sum_, operand_,
                             ptx::descriptor_across(operand_of(summed(), item_), kM * 128));
  }

  /// A piece of dQ = dS K.
  __device__ __forceinline__ void issue_queries(int piece) {
    const std::uint32_t a = ptx::descriptor_across(operand_of(buffers.scores, item_), kN * 128);
    const std::uint32_t b = ptx::descriptor_across(tile().k + piece * kN * 128, kN * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      QueryWgmma::shared_across(dq_, ptx::descriptor(a + i * 16 * 128 / 16),
                                ptx::descriptor(b + i * 16 * 128 / 16), i != 0);
    }
    ptx::wgmma_commit();
  }

  // ---- weights ----

  /// S^T becomes P^T. With extras S^T are base-2 scores.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(int m) {
    const float factor = kExtras ? 1.0F : p.score.pre;
    const std::uint32_t shifts = buffers.shifts_of(item_) + lane_ % 4 * 8;
#pragma unroll
    for (int c = 0; c < kM / 8; ++c) {
      float shift[2];
      ptx::load_shared(shifts + c * 32, shift[0], shift[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores_[4 * c + i];
        x = ptx::ex2(fmaf(x, factor, -shift[i % 2]));
      }
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = key_of(half), first = m * kM + static_cast<int>(lane_ % 4 * 2);
        core::Range rows = tile().band.queries_of({key, key + 1});
        if (key >= tile().band.seqlen_k) rows = {0, 0};
        mask_row(scores_, half, {rows.begin - first, rows.end - first}, 0.0F);
      }
    }
  }

  /// P^T to shared memory as it lies in registers; the keys' thread of the same number reads it.
  __device__ __forceinline__ void store_weights() const {
    const std::uint32_t to = buffers.weights + threadIdx.x % 128 * 16;
#pragma unroll
    for (int c = 0; c < kM / 8; ++c) {
      ptx::store_shared(to + c * 128 * 16, scores_[4 * c], scores_[4 * c + 1], scores_[4 * c + 2],
                        scores_[4 * c + 3]);
    }
  }

  /// dP^T becomes dS^T. Where a weight is 0 the other factor may be anything.
  template <bool kMasked>
  __device__ __forceinline__ void differentiate() {
    const std::uint32_t deltas = buffers.deltas_of(item_) + lane_ % 4 * 8;
    const std::uint32_t weights = buffers.weights + threadIdx.x % 128 * 16;
#pragma unroll
    for (int c = 0; c < kM / 8; ++c) {
      float delta[2], weight[4];
      ptx::load_shared(deltas + c * 32, delta[0], delta[1]);
      ptx::load_shared(weights + c * 128 * 16, weight[0], weight[1], weight[2], weight[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores_[4 * c + i];
        x = weight[i] * (x - delta[i % 2]);
        if (kMasked && weight[i] == 0.0F) x = 0.0F;
      }
    }
  }

  __device__ __forceinline__ void make_operand() {
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) {
      operand_[i] = ptx::pack<S::kType>(scores_[2 * i], scores_[2 * i + 1]);
    }
  }

  /// dS^T to shared memory: a row a key, 16-byte units of eight rows of Q, in the 128-byte swizzle.
  __device__ __forceinline__ void store_scores() const {
    const std::uint32_t row = warp_ * 16 + lane_ % 16;
    const std::uint32_t to =
        buffers.scores.buffer(item_) + row * 128 + (lane_ / 16 ^ lane_ % 8) * 16;
#pragma unroll
    for (int j = 0; j < kM / 16; ++j) ptx::store_matrices(to ^ j * 32, operand_ + 4 * j);
  }

  /// Whose turn it is to add.
  __device__ __forceinline__ QueryTurns<K> turns() const {
    return {p, buffers.words, kValues ? 0 : 1, kOwn, leads_};
  }
  /// Where this thread's part of the first piece of dQ goes.
  __device__ __forceinline__ float* first_piece() const {
    const int piece = buffers.block() * S::kChunks + kFirstPiece;
    return p.rows.dq_at(turns().order(item_).index) + piece * kPieceFloats +
           piece_place(static_cast<int>(threadIdx.x % 128), 0);
  }
  __device__ __forceinline__ void add_queries(float* to, std::uint32_t item) const {
    if (kPair || agreed(p.in_order)) return add_in_order(to, item);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float(&x)[32] = dq_;
      ptx::add_global(to + i * 512, x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }
  __device__ __forceinline__ void add_in_order(float* to, std::uint32_t item) const {
    // What is there has not been made 0 where somebody is the first to add.
    const bool first = (!kPair || p.in_order) && turns().first(item);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float(&x)[32] = dq_;
      ptx::add_global_or_store(first, to + i * 512, x[4 * i], x[4 * i + 1], x[4 * i + 2],
                               x[4 * i + 3]);
    }
  }

  /// The piece of dQ that was left under way, of the step before.
  __device__ __forceinline__ void add_last() const {
    if (kFirstPiece == kLastPiece && p.in_order) turns().take(item_ - 1);
    add_queries(pending_, item_ - 1);
    if (p.in_order) turns().pass(item_ - 1);
  }

  // ---- results ----

  __device__ __forceinline__ int key_of(int half) const {
    // Of scarce registers none for what a few instructions make.
    const int warp = kScarce ? static_cast<int>(ptx::opaque(threadIdx.x) % 128 / 32) : warp_;
    return tile().first_key + fragment_row(warp, lane_, half);
  }

  /// Gives the tile back first: the next keys come while this one's are written.
  __device__ __forceinline__ void write() {
    ptx::wgmma_results(sum_);
    // So that it is not kept meanwhile.
    if constexpr (kExtras || kScarce) tile_item_ = tile().item;
    const bool shared = agreed(p.key_sums.data != nullptr);
    void* const to = shared ? static_cast<void*>(sums_place()) : static_cast<void*>(result_place());
    const int left = tile().band.seqlen_k - key_of(0);
    ptx::barrier_sync(kOwn, 128);
    if (leads_) {
      buffers.k.release(tile_item_);
      buffers.v.release(tile_item_);
    }
    if (shared) {
      store_pieces(sum_, static_cast<float*>(to), static_cast<int>(threadIdx.x % 128));
      return;
    }
    const core::Strides& strides = kValues ? p.dv_strides : p.dk_strides;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_row<S::kType, K.any_layout>(
          sum_, half, kValues ? 1.0F : p.score.scale, 8 * half < left, lane_,
          (kValues ? p.head_dim_v : p.head_dim) - first_column(),
          static_cast<std::uint16_t*>(to) + 8 * half * strides.seqlen);
    }
  }
  __device__ __forceinline__ int first_column() const {
    return kValues ? buffers.first_column_v() : buffers.first_column();
  }
  /// The thread's first row and column.
  __device__ __forceinline__ std::uint16_t* result_place() const {
    const core::Strides& strides = kValues ? p.dv_strides : p.dk_strides;
    return static_cast<std::uint16_t*>(kValues ? p.dv : p.dk) + tile().entry * strides.batch +
           tile().head * strides.head + (tile().first_row + key_of(0)) * strides.seqlen +
           first_column() + store_column(lane_);
  }
  /// Where others have steps of the same keys.
  __device__ __forceinline__ float* sums_place() const {
    const int piece = kValues ? buffers.block() * S::kChunksV
                              : p.key_sums.pieces_of_dv + buffers.block() * S::kChunks;
    return p.key_sums.at(tile().batch, tile().head, tile().first_key / kN, tile().split) +
           piece * kPieceFloats;
  }

  const BackwardParams& p;
  const BackwardBuffers<K>& buffers;
  const int warp_;  ///< of the warpgroup
  const std::uint32_t lane_;
  const bool leads_;  ///< arrives at barriers for its warpgroup

  std::uint32_t tile_item_ = ~0U;  ///< in the rings of K and V
  std::uint32_t item_ = 0;         ///< in the rings of Q and dO
  float scores_[kM / 2];
  std::uint32_t operand_[kM / 4];
  float dq_[32];              ///< a piece of dQ
  float* pending_ = nullptr;  ///< where it goes once it is there; null: there is none
  float sum_[kSumDim / 2];
  ScoreSums<kM / 2, 2 * 4> sums_;  ///< of S^T or dP^T; of a cluster only
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void backward_wide(const BackwardParams& p, char* shared) {
  using S = BackwardShape<K>;
  const BackwardBuffers<K> buffers(shared);
  // Told to be the same for the whole warp.
  const int group = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) buffers.initialise();
  if constexpr (K.cluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  if (group == 0) {
    ptx::lower_registers<S::kProducerRegisters>();
    if (threadIdx.x < S::kProducers) BackwardProducer<K>(p, buffers).run();
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    if (group == 1) {
      WideConsumer<K, Role::values>(p, buffers).run();
    } else {
      WideConsumer<K, Role::keys>(p, buffers).run();
    }
    // Until then the other block may still store here.
    if constexpr (K.cluster > 1) ptx::cluster_sync();
  }
}

}  // namespace tessera::cuda::sm90
