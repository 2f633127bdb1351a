// The backward pass on Hopper at head dims from 200 to 256, where adding dQ to memory takes longer
// than multiplying: two blocks of threads of a cluster, each with 64 keys, exchange dS, and each
// sums half of dQ's columns over all 128 keys, which halves what is added. Roles and what they hand
// over are those of backward_wide.h; but dQ of a step is multiplied in the next one, when the other
// block's dS is there, and is added in the one after that:
//
//   values:  P^T, hand over, issue dV, the next S^T and the last step's dQ
//   keys:    wait for P^T, dS^T, hand over and send, issue dK and the last step's dQ, the next dP^T
//
// dO has one buffer, as the other block's dS and keys need room. Nobody adds in turns: problems
// whose sums have an order have other rows.
#pragma once

#include "cuda/ptx/cluster.h"
#include "cuda/sm90/backward_roles.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K, Role kRole>
class ExchangeConsumer : RoleConsumer<K, kRole> {
  using Base = RoleConsumer<K, kRole>;
  using Base::add_queries;
  using Base::buffers;
  using Base::clear_summed;
  using Base::dq_;
  using Base::first_piece;
  using Base::issue_scores;
  using Base::issue_sum;
  using Base::item_;
  using Base::kBoth, Base::kN, Base::kOwn;
  using Base::kFirstPiece, Base::kPieces, Base::kScoresReady, Base::kValues;
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
  using typename Base::S;
  friend Base;
  using Base::lane_, Base::operand_of, Base::warp_;

  static_assert(dout_stages(K) == 1 && kFirstPiece == Base::kLastPiece && Base::kM == 64);

 public:
  __device__ __forceinline__ ExchangeConsumer(const BackwardParams& params,
                                              const BackwardBuffers<K>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void run() { Base::run(*this); }

 private:
  __device__ __forceinline__ void walk() {
    steps_ = 0;
    Base::walk_rows(*this);
    finish();
  }

  template <bool kMasked, bool kLast>
  __device__ __forceinline__ void step(int m) {
    const bool first = agreed(steps_ == 0), pending = agreed(steps_ > 1);
    if constexpr (kValues) {
      Base::template weigh<kMasked>(m);
      // The keys have read P^T of the step before, and made its dS^T.
      if (first) {
        ptx::barrier_sync(kOwn, 128);
      } else {
        ptx::barrier_sync(kScoresReady, kBoth);
      }
      if (leads_) scored().release(item_);
      store_weights();
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(dq_);
      ptx::barrier_arrive(kWeightsReady, kBoth);
      make_operand();
    } else {
      ptx::barrier_sync(kWeightsReady, kBoth);
      Base::template differentiate<kMasked>();
      make_operand();
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(dq_);
    }
    give_back(pending, item_ - 2);
    if constexpr (!kValues) {
      buffers.received.claim(item_);
      store_scores();
      ptx::fence_proxy_async();
      send_scores();
      ptx::barrier_arrive(kScoresReady, kBoth);
      ptx::barrier_sync(kOwn, 128);
      if (leads_) scored().release(item_);
    }
    summed().wait_full(item_);
    if constexpr (kMasked) clear_summed(m);
    issue_sum();
    if constexpr (kValues && !kLast) issue_scores(item_ + 1);
    if (pending) add_queries(first_piece(item_ - 2), item_ - 2);
    // Of a tile's first step this is not wanted, and nobody takes it.
    issue_queries(item_ - 1);
    if constexpr (kValues) {
      // dO, of which there is one buffer, as soon as dV is there.
      ptx::wgmma_wait<kLast ? 1 : 2>();
      if (leads_) summed().release(item_);
      if constexpr (!kLast) {
        ptx::wgmma_wait<1>();
        take_scores();
      }
    } else {
      ptx::wgmma_wait<1>();
      if (leads_) summed().release(item_);
      if constexpr (!kLast) {
        issue_scores(item_ + 1);
        ptx::wgmma_wait<0>();
        take_scores();
      }
    }
    ++item_;
    ++steps_;
  }

  /// dQ of the last two steps.
  __device__ __forceinline__ void finish() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(dq_);
    const bool pending = agreed(steps_ > 1);
    give_back(pending, item_ - 2);
    if (pending) add_queries(first_piece(item_ - 2), item_ - 2);
    if constexpr (kValues) ptx::barrier_sync(kScoresReady, kBoth);
    issue_queries(item_ - 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(dq_);
    give_back(true, item_ - 1);
    add_queries(first_piece(item_ - 1), item_ - 1);
  }

  /// The warpgroup's piece of dQ = dS K, over its block's keys and the other's.
  __device__ __forceinline__ void issue_queries(std::uint32_t item) {
    buffers.received.wait_full(item);
    ptx::wgmma_fence();
    const auto along = [](std::uint32_t x) { return ptx::descriptor_across(x, kN * 128); };
    const std::uint32_t own = buffers.block() * kPieces + kFirstPiece;
    const std::uint32_t other = buffers.operand(buffers.other_keys) + kFirstPiece * kN * 128;
    Base::multiply_keys(along(operand_of(buffers.scores, item)), along(tile().k + own * kN * 128),
                        false);
    Base::multiply_keys(along(operand_of(buffers.received, item)), along(other), true);
    ptx::wgmma_commit();
  }

  /// A warp's 16 keys of dS^T, to the other block of the cluster.
  __device__ __forceinline__ void send_scores() const {
    constexpr std::uint32_t kBytes = S::kScoreBytes / 4;
    const auto there = [this](std::uint32_t x) { return ptx::address_in(buffers.other(), x); };
    ptx::mbarrier_expect_if(leads_, buffers.received.full_barrier(item_), S::kScoreBytes);
    __syncwarp();
    ptx::bulk_send_if(lane_ == 0, there(buffers.received.buffer(item_) + warp_ * kBytes),
                      buffers.scores.buffer(item_) + warp_ * kBytes, kBytes,
                      there(buffers.received.full_barrier(item_)));
  }
  /// What was received for an item has been multiplied.
  __device__ __forceinline__ void give_back(bool any, std::uint32_t item) const {
    ptx::mbarrier_arrive_there_if(
        leads_ && any, ptx::address_in(buffers.other(), buffers.received.empty + item % 2 * 8));
  }

  int steps_ = 0;  ///< of the tile that are done
};

}  // namespace tessera::cuda::sm90
