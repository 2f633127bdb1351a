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

#include "cuda/sm90/backward_exchange.h"
#include "cuda/sm90/backward_producer.h"
#include "cuda/sm90/backward_roles.h"
#include "cuda/tile/backward_extras.h"

namespace tessera::cuda::sm90 {

/// The consumer of rows that do not exchange dS.
template <core::Kernel K, Role kRole>
class WideConsumer : RoleConsumer<K, kRole> {
  using Base = RoleConsumer<K, kRole>;
  using Base::add_queries;
  using Base::buffers;
  using Base::clear_summed;
  using Base::dq_;
  using Base::first_piece;
  using Base::issue_scores;
  using Base::issue_sum;
  using Base::item_;
  using Base::kBoth, Base::kExtras, Base::kM, Base::kN, Base::kOwn;
  using Base::kFirstPiece, Base::kLastPiece, Base::kScoresReady, Base::kValues;
  using Base::kWeightsReady;
  using Base::leads_;
  using Base::make_operand;
  using Base::p;
  using Base::scored;
  using Base::store_scores;
  using Base::store_weights;
  using Base::summed;
  using Base::take_scores;
  using Base::tile;
  using Base::turns;
  using typename Base::S;
  friend Base;
  using Base::key_of, Base::lane_, Base::operand_of, Base::scores_, Base::sum_;

  /// Where dO has one buffer, it is given back as soon as it has been multiplied, and the keys,
  /// who wait for the next one, leave all else under way before.
  static constexpr bool kOneDout = !kExtras && dout_stages(K) == 1;
  static constexpr bool kScoresLate = kOneDout && !kValues;

 public:
  __device__ __forceinline__ WideConsumer(const BackwardParams& params,
                                          const BackwardBuffers<K>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void run() { Base::run(*this); }

 private:
  __device__ __forceinline__ void walk() {
    if constexpr (kExtras) {
      walk_with_extras();
    } else {
      pending_ = nullptr;
      Base::walk_rows(*this);
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(dq_);
      add_last();
    }
  }

  template <bool kMasked, bool kLast>
  __device__ __forceinline__ void step(int m) {
    if constexpr (kValues) {
      Base::template weigh<kMasked>(m);
      store_weights();
      ptx::barrier_arrive(kWeightsReady, kBoth);
      make_operand();
    } else {
      ptx::barrier_sync(kWeightsReady, kBoth);
      Base::template differentiate<kMasked>();
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
    pending_ = first_piece(item_);
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
      Base::template weigh<true>(m);
      store_weights();
      ptx::barrier_arrive(kWeightsReady, kBoth);
      drop(p, place, scores_);
      make_operand();
    } else {
      drop(p, place, scores_);
      ptx::barrier_sync(kWeightsReady, kBoth);
      Base::template differentiate<true>();
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
    float* to = first_piece(item_);
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

  // ---- dQ ----

  /// A piece of dQ.
  __device__ __forceinline__ void issue_queries(int piece) {
    const std::uint32_t a = ptx::descriptor_across(operand_of(buffers.scores, item_), kN * 128);
    const std::uint32_t b = ptx::descriptor_across(tile().k + piece * kN * 128, kN * 128);
    ptx::wgmma_fence();
    Base::multiply_keys(a, b, false);
    ptx::wgmma_commit();
  }

  /// The piece of dQ that was left under way, of the step before.
  __device__ __forceinline__ void add_last() const {
    if (kFirstPiece == kLastPiece && p.in_order) turns().take(item_ - 1);
    add_queries(pending_, item_ - 1);
    if (p.in_order) turns().pass(item_ - 1);
  }

  float* pending_ = nullptr;  ///< where the piece of dQ goes that is under way; null: there is none
};

template <core::Kernel K, Role kRole>
__device__ __forceinline__ void consume(const BackwardParams& p,
                                        const BackwardBuffers<K>& buffers) {
  if constexpr (exchanges(K)) {
    ExchangeConsumer<K, kRole>(p, buffers).run();
  } else {
    WideConsumer<K, kRole>(p, buffers).run();
  }
}

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
      consume<K, Role::values>(p, buffers);
    } else {
      consume<K, Role::keys>(p, buffers);
    }
    // Until then the other block may still store here.
    if constexpr (K.cluster > 1) ptx::cluster_sync();
  }
}

}  // namespace tessera::cuda::sm90
