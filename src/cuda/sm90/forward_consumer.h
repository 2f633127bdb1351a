// The consumers of the Hopper forward kernel (forward.h): S = Q K^T of a block is issued beside O
// += P V of the block before it, then P of the new block is made from S in registers. The stream of
// blocks does not end with a tile: the first S of the next tile is issued beside the last O of this
// one, or beside its way to memory. The warpgroups issue one after the other (a named barrier
// each), so that one multiplies while another is at its exponentials.
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/forward_8bit.h"
#include "cuda/sm90/forward_buffers.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/sm90/forward_rows.h"
#include "cuda/sm90/products.h"
#include "cuda/sm90/score_sums.h"
#include "cuda/tile/dropout.h"
#include "cuda/tile/extras.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softcap.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
class ForwardConsumer : ForwardRows<K> {
  using Base = ForwardRows<K>;
  using S = ForwardShape<K>;
  using Base::begin_issue;
  using Base::buffers;
  using Base::clear_values;
  using Base::end_issue;
  using Base::group_;
  using Base::head_of;
  using Base::item_;
  using Base::lane_;
  using Base::leads_;
  using Base::next_tile;
  using Base::p;
  using Base::q_descriptor_;
  using Base::q_item_;
  using Base::queries_;
  using Base::query_of;
  using Base::release_keys;
  using Base::release_queries;
  using Base::row_exists;
  using Base::row_of;
  using Base::skip_keys;
  using Base::skip_values;
  using Base::store_lse;
  using Base::warp_;
  using Base::weighed_;
  using ScoreWgmma = ptx::Wgmma<S::kScoreType, K.block_n>;
  static constexpr int kAccumulators = ConsumerState<K>::kAccumulators;
  static constexpr int kN = K.block_n;
  static constexpr bool kAll = K.extra == core::Extra::all;
  static constexpr bool kSoftcap = K.extra == core::Extra::softcap;
  /// The next one may issue when O is there, not when it has been issued: faster where two
  /// warpgroups take longer over weights than over products, slower where products are the limit.
  static constexpr bool kEndsLate =
      K.extra == core::Extra::none && S::kDim == 64 && S::kGroups == 2;
  static constexpr bool kIntegers = S::kScoreType == Dtype::i8;
  static constexpr bool kWritesFirst = writes_first(K);
  /// Scales of a block's keys are asked for while its scores are multiplied. Where they are not, it
  /// is for registers' sake.
  static constexpr bool kAsksLate = core::shares_scale(K) && !rounds_promoted(K);

 public:
  __device__ __forceinline__ ForwardConsumer(const ForwardParams& params,
                                             const ForwardBuffers<K>& shared, int group)
      : Base(params, shared, group),
        scaled_(params, shared.promoted, group),
        sums_(shared.sums, shared.sums_full, shared.other(), group * 4 + warp_),
        w_(kAll       ? 1.0F
           : kSoftcap ? params.score.pre * params.score.post
                      : params.score.pre) {}

  __device__ __forceinline__ void run() {
    if (group_ == S::kGroups - 1) end_issue();
    if constexpr (kAll) {
      walk_with_extras();
    } else {
      core::KeyBlocks own;
      if (!next_tile(tile_, own)) return;
      float sum[2];
      begin(tile_, own);
      start(own);
      for (;;) {
        walk(own);
        Tile next;
        if constexpr (kWritesFirst) {
          buffers.v.wait_full(weighed_);
          issue_output();
          const bool more = next_tile(next, own);
          await_output();
          if (leads_) buffers.v.release(weighed_);
          recall_tile();
          complete_output(sum);
          if (!more) break;
          begin(next, own);
          write(tile_, w_.reference, sum, v_scale_before());
          tile_ = next;
          start(own);
        } else {
          if (!next_tile(next, own)) break;
          cross(next, own);
        }
      }
      if constexpr (!kWritesFirst) {
        finish_output();
        complete_output(sum);
      }
      write(tile_, w_.reference, sum, v_scale_before());
      // What is on its way is read from this block's memory.
      if constexpr (stages_rows(K)) StagedRows<K>::await();
    }
  }

 private:
  // ---- products ----

  /// S = Q K^T of item_.
  __device__ __forceinline__ void issue_scores() {
    const std::uint32_t k = ptx::descriptor_along(buffers.operand(buffers.k.buffer(item_)));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kDim / S::kStepColumns; ++i) {
      const int chunk = i / 4, column = i % 4 * 32;
      const std::uint64_t keys = ptx::descriptor(k + (chunk * kN * 128 + column) / 16);
      if constexpr (S::kHoldsQueries) {
        ScoreWgmma::registers(w_.s, queries_ + 4 * i, keys, i != 0);
      } else {
        ScoreWgmma::shared(w_.s,
                           ptx::descriptor(q_descriptor_ + (chunk * K.q_rows * 128 + column) / 16),
                           keys, i != 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// O += P V of the item whose weights are the operand.
  __device__ __forceinline__ void issue_output() {
    const std::uint32_t v = buffers.operand(buffers.v.buffer(weighed_));
    if constexpr (S::kEightBit) {
      add_panels<S::kDimV, S::kPanels>(o_, w_.operand, ptx::descriptor_of_panel(v),
                                       scaled_.begins());
    } else {
      add_across<ptx::Wgmma<S::kType, S::kDimV>, kN>(o_, w_.operand,
                                                     ptx::descriptor_across(v, kN * 128));
    }
  }

  // ---- a tile ----

  /// Issues S of a tile's first block, with nothing beside it.
  __device__ __forceinline__ void begin(const Tile& t, const core::KeyBlocks& own) {
    skip_keys(t.blocks_end - own.seen.end);
    ++item_;
    buffers.k.wait_full(item_);
    begin_issue();
    issue_scores();
    end_issue();
  }

  /// P of it. There is no O yet.
  __device__ __forceinline__ void start(const core::KeyBlocks& own) {
    const int first = own.seen.end - 1;
    w_.reset();
    take_scales(tile_, own);
    if constexpr (!S::kSparesQueries) await_readers(own);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(w_.s);
    release_keys(own.seen.size() == 1);
    complete_scores();
    begin_output(own);
    if constexpr (S::kScaled) {
      weigh_scaled<true>(tile_, first, is_masked(own, first), true, [] {}, [] {});
      take_weights();
    } else {
      weigh(tile_, first, own);
      make_operand();
    }
    skip_values(tile_.blocks_end - own.seen.end);
    clear_values(tile_, own, weighed_);
  }

  /// All blocks but the first.
  __device__ __forceinline__ void walk(const core::KeyBlocks& own) {
    int n = own.seen.end - 2;
#pragma unroll 1
    for (; n >= core::max(own.seen.begin, own.full.end); --n) step<true>(n, n == own.seen.begin);
    const int full_begin = core::max(own.seen.begin, own.full.begin);
#pragma unroll 1
    for (; n >= full_begin; --n) step<false>(n, n == own.seen.begin);
#pragma unroll 1
    for (; n >= own.seen.begin; --n) step<true>(n, n == own.seen.begin);
    if constexpr (S::kSparesQueries) await_readers(own);
    release_queries();
  }
  /// With the queries of an only block the tile's scales are let go: by now all warps must have
  /// read them. With more blocks their next turn to issue sees to that.
  __device__ __forceinline__ void await_readers(const core::KeyBlocks& own) const {
    if constexpr (S::kScaled) {
      if (agreed(own.seen.size() == 1)) ptx::barrier_sync(1 + S::kGroups + group_, 128);
    }
  }

  /// From the last block of tile_ to the first of the next one, which becomes tile_.
  __device__ __forceinline__ void cross(const Tile& next, const core::KeyBlocks& own) {
    const int skipped = next.blocks_end - own.seen.end, first = own.seen.end - 1;
    skip_keys(skipped);
    const float reference[2] = {w_.reference[0], w_.reference[1]}, v_scale = v_scale_before();
    float sum[2];
    if constexpr (!S::kEightBit) complete_output(sum);
    take_scales(next, own);
    begin_step();
    release_keys(own.seen.size() == 1);
    complete_scores();
    w_.reset();
    if constexpr (S::kScaled) {
      take_output();
      weigh_scaled<true>(next, first, is_masked(own, first), true, [] {}, [] {});
      if constexpr (S::kEightBit) complete_output(sum);
      take_weights();
    } else {
      weigh(next, first, own);
      finish_step();
    }
    skip_values(skipped);
    clear_values(next, own, weighed_);
    write(tile_, reference, sum, v_scale);
    begin_output(own);
    tile_ = next;
  }

  // ---- all tiles of rows with extras ----

  /// A step with extras is long, so it is there once: for the first block of a tile, with the last
  /// O of the tile before beside it, and for all others. Before the first tile of all there is one
  /// without rows, and with weights of 0 for a buffer of values that nobody waits for or releases.
  __device__ __forceinline__ void walk_with_extras() {
    clear_output();
    w_.reset();
    w_.clear_operand();
    tile_.first_row = 0;
    core::KeyBlocks own;
    own.seen = {0, 0};
    for (int n = -1;; --n) {
      const bool crosses = agreed(n < own.seen.begin), begun = agreed(weighed_ != ~0U);
      bool more = true;
      Tile next = tile_;
      const float reference[2] = {w_.reference[0], w_.reference[1]};
      float sum[2] = {w_.sum[0], w_.sum[1]};
      if (crosses) {
        if (begun) release_queries();
        more = next_tile(next, own);
        n = own.seen.end - 1;
        w_.reset();
      }
      const int skipped = crosses ? next.blocks_end - own.seen.end : 0;
      if (more) {
        skip_keys(skipped);
        begin_step(begun);
        release_keys(n == own.seen.begin);
        complete_scores();
        transform(next, n);
        const bool rescales = weigh(next, n, own);
        drop(next, n);
        finish_step(begun);
        if (rescales && !crosses) rescale();
      } else if (begun) {
        finish_output();
      }
      if (crosses) {
        if (more) {
          skip_values(skipped);
          clear_values(next, own, weighed_);
        }
        write(tile_, reference, sum, v_scale_before());
        if (!more) return;
        clear_output();
        tile_ = next;
      }
    }
  }

  /// O of the last tile.
  __device__ __forceinline__ void finish_output() {
    buffers.v.wait_full(weighed_);
    issue_output();
    await_output();
  }

  /// The last O of tile_ is there: all of O and the sums of its rows' weights.
  __device__ __forceinline__ void complete_output(float (&sum)[2]) {
    if constexpr (S::kEightBit) {
      scaled_.finish(tile_, o_, sum);
    } else {
      sum[0] = w_.sum[0];
      sum[1] = w_.sum[1];
    }
  }

  // ---- a block of keys ----

  /// Issues S of the next item and O of the one before; returns when S is there. begun: there is
  /// one before. beside(): what is to be done meanwhile.
  template <class Beside>
  __device__ __forceinline__ void begin_step(bool begun, const Beside& beside) {
    ++item_;
    buffers.k.wait_full(item_);
    begin_issue();
    issue_scores();
    if (begun) buffers.v.wait_full(weighed_);
    issue_output();
    if constexpr (!kEndsLate) end_issue();
    beside();
    ptx::wgmma_wait<K.any_layout ? 0 : 1>();
    ptx::wgmma_results(w_.s);
  }
  __device__ __forceinline__ void begin_step(bool begun = true) {
    begin_step(begun, [] {});
  }
  /// What S is without the columns of the cluster's other block.
  __device__ __forceinline__ void complete_scores() {
    if constexpr (K.cluster > 1) sums_.add(w_.s);
  }

  /// Waits for O and makes P the next operand.
  __device__ __forceinline__ void finish_step(bool begun = true) {
    take_output(begun);
    make_operand();
  }
  __device__ __forceinline__ void take_output(bool begun = true) {
    await_output();
    if constexpr (kEndsLate) end_issue();
    if (begun && leads_) buffers.v.release(weighed_);
  }
  __device__ __forceinline__ void await_output() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(o_);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int n, bool last_of_tile) {
    if constexpr (S::kScaled && !kAsksLate) scaled_.ask(tile_, n, buffers.scales(q_item_), w_);
    begin_step(true, [&] {
      if constexpr (kAsksLate) scaled_.ask(tile_, n, buffers.scales(q_item_), w_);
    });
    release_keys(last_of_tile);
    complete_scores();
    if constexpr (S::kScaled) {
      weigh_scaled<kMasked>(tile_, n, kMasked, false, [&] { take_output(); }, [&] { rescale(); });
      if constexpr (S::kEightBit) scaled_.promote_after(tile_, n + 1, o_);
      take_weights();
    } else if constexpr (kSoftcap) {
      soften<kMasked>(n);
    } else {
      if constexpr (kMasked) mask(tile_, n);
      take_output();
      weighed_ = item_;
      w_.weigh_at_once([&] { rescale(); });
    }
  }

  /// What is left of a step with a softcap.
  template <bool kMasked>
  __device__ __forceinline__ void soften(int n) {
    // Above 128 columns O takes so long that waiting for it first costs more than it saves.
    constexpr bool kNarrowFirst = !kMasked && S::kDim <= 128;
    if constexpr (kNarrowFirst) {
      take_output();
      if (w_.weigh_narrow(p.series)) {
        weighed_ = item_;
        return;
      }
    }
    float top[2];
    const Uncapped raw = look(top);
    if constexpr (kMasked) {
      mask(tile_, n);
      greatest_or_zero(w_.s, top);
    }
    const bool rescales = w_.soften(top, raw, p.series);
    if constexpr (!kNarrowFirst) take_output();
    make_operand();
    if (rescales) rescale();
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) o_[i] *= w_.factor[i / 2 % 2];
    if constexpr (S::kEightBit) scaled_.rescale(w_.factor);
  }

  /// Of 8 bits: S of the n-th block of tile t, perhaps its first, becomes weights; arrive, rescale:
  /// see weigh_parts(). kMayMask: `masked` may be true.
  template <bool kMayMask, class Arrive, class Rescale>
  __device__ __forceinline__ void weigh_scaled(const Tile& t, int n, bool masked, bool first,
                                               const Arrive& arrive, const Rescale& rescale) {
    constexpr bool kBits = kIntegers && !kMayMask && !kSoftcap;
    if constexpr (kIntegers && !kBits) w_.convert();
    if constexpr (kSoftcap) w_.cap(p.score.post);
    if (masked) mask(t, n);
    w_.template weigh<kBits>(first, arrive, rescale);
  }
  /// They are the next operand. The O before it is there.
  __device__ __forceinline__ void take_weights() {
    w_.take(held_scores(K) > 0 ? static_cast<std::uint32_t>(p.promotion) >> 31 : 0);
    weighed_ = item_;
  }
  /// Of 8 bits: the scales of a tile's rows, and of the keys of its first block.
  __device__ __forceinline__ void take_scales(const Tile& t, const core::KeyBlocks& own) {
    if constexpr (S::kScaled) {
      scaled_.take_scales(
          t, buffers.scales(q_item_), w_, [&](int half) { return query_of(t, half); },
          [&](int half) { return head_of(t, half); });
      scaled_.ask(t, own.seen.end - 1, buffers.scales(q_item_), w_);
    }
  }

  /// S of the n-th block, any of those of tile t, becomes P. True: O must be rescaled.
  __device__ __forceinline__ bool weigh(const Tile& t, int n, const core::KeyBlocks& own) {
    float top[2];
    const Uncapped raw = look(top);
    if (is_masked(own, n)) mask(t, n);
    greatest_or_zero(w_.s, top);
    return w_.soften(top, raw, p.series);
  }
  /// P is the next operand.
  __device__ __forceinline__ void make_operand() {
    weighed_ = item_;
    w_.make_operand();
  }

  // ---- scores to weights; score i of a thread: query row_of(i), key key_of(n, i) ----

  __device__ __forceinline__ int key_of(int n, int i) const {
    return n * kN + i / 4 * 8 + lane_ % 4 * 2 + i % 2;
  }

  __device__ __forceinline__ static bool is_masked(const core::KeyBlocks& own, int n) {
    return agreed(n >= own.full.end || n < own.full.begin);
  }
  __device__ __forceinline__ void mask(const Tile& t, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::Range keys = t.band.keys_of(query_of(t, half));
      const int first = n * kN + static_cast<int>(Base::lane_anew()) % 4 * 2;
      mask_row(w_.s, half, {keys.begin - first, keys.end - first}, -core::kInfinity);
    }
  }

  /// The rows' greatest scores, and the softcap where a series serves for it.
  __device__ __forceinline__ Uncapped look(float (&top)[2]) {
    if constexpr (kSoftcap) {
      return cap(p.score, p.series, w_.s, top);
    } else {
      return {};
    }
  }

  /// Softcap, bias and ALiBi: raw products become base-2 scores (S1).
  __device__ __forceinline__ void transform(const Tile& t, int n) {
    if (p.score.capped) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) w_.s[i] = capped_tanh(p.score.pre, w_.s[i]) * p.score.post;
    } else {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) w_.s[i] *= p.score.pre;
    }
    add_extras<Axis::rows>(
        p.extras, {t.batch, t.head, row_of(t, 0), key_of(n, 0), t.band.seqlen_q, t.band.seqlen_k},
        w_.s);
  }

  /// Dropout of P (S8); the sum has been taken.
  __device__ __forceinline__ void drop(const Tile& t, int n) {
    if (!p.dropout.active()) return;
    drop_weights(
        p.dropout, t.batch, t.head, n * kN, lane_, [&](int half) { return row_of(t, half); }, w_.s);
  }

  /// Of a tile's blocks the first comes next.
  __device__ __forceinline__ void begin_output(const core::KeyBlocks& own) {
    if constexpr (S::kEightBit) {
      scaled_.begin(own.seen.begin);
    } else {
      clear_output();
    }
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < S::kDimV / 2; ++i) o_[i] = 0.0F;
  }

  // ---- results ----

  /// The scale that the values of the tile before share. Where tiles go their order says so, until
  /// it is let go with the queries.
  __device__ __forceinline__ float v_scale_before() const {
    if constexpr (S::kEightBit) return buffers.scales(q_item_).last_v;
    return 1.0F;
  }
  /// What tile_ needs for its results, of which the next one's order speaks, too: no registers hold
  /// it until then.
  __device__ __forceinline__ void recall_tile() {
    const TileScales& scales = buffers.scales(q_item_);
    tile_.head = scales.last_head;
    tile_.batch = scales.last_batch;
    tile_.first_q = scales.last_first_q;
    tile_.o = scales.last_o;
    tile_.softmax_lse = scales.last_softmax_lse;
  }
  /// A tile's rows: their softmax, and O.
  __device__ __forceinline__ void write(const Tile& t, const float (&reference)[2], float (&sum)[2],
                                        float v_scale) {
    const float sink = p.sink == nullptr ? 0.0F : p.sink[t.head];
    float scale = v_scale;  // what o must be multiplied by besides
    if constexpr (S::kEightBit) scale = scaled_.scale_values(t, v_scale, sum, o_);
    [[maybe_unused]] float factor[2], lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::Softmax<float> row = row_state(t, half, reference[half], sum[half]);
      const core::FinishedRow<float> end = core::finish(row, p.sink != nullptr, sink);
      if constexpr (stages_rows(K)) {
        factor[half] = end.factor * scale;
        lse[half] = core::lse_of(end.state);
      } else {
        const bool exists = row_exists(t, half);
        store_lse(t, half, exists, core::lse_of(end.state));
        Base::store(t, half, exists, o_, end.factor * scale);
      }
    }
    if constexpr (stages_rows(K)) {
      send(t, factor);
      // Not before: the copy engine's fence would wait for it.
#pragma unroll
      for (int half = 0; half < 2; ++half) store_lse(t, half, row_exists(t, half), lse[half]);
    }
  }
  /// A warp's rows of O at once, times their factors. Where they are not all of their sequence, and
  /// others lie behind them, each thread stores what exists.
  __device__ __forceinline__ void send(const Tile& t, const float (&factor)[2]) const {
    const int row = t.first_row + group_ * kRows + warp_ * kStagedRows;
    const int query = p.rows.query_of(row), head = t.head << p.rows.shift;
    const bool whole = p.rows.query_of(row + kStagedRows - 1) < t.band.seqlen_q;
    if (agreed(p.o_in_boxes && (whole || !p.sequences.packed()))) {
      const StagedRows<K> staged = scaled_.staged();
      staged.await();
      if (agreed(p.o_is_f16)) {
        staged.template lay<Dtype::f16>(o_, factor);
      } else {
        staged.template lay<Dtype::bf16>(o_, factor);
      }
      const int at = t.first_q + query, batch = p.sequences.packed() ? 0 : t.batch;
      const bool heads_first = p.rows.shift > 0;
      staged.send(p.o_map, heads_first ? head : at, heads_first ? at : head, batch);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      Base::store(t, half, row_exists(t, half), o_, factor[half]);
  }
  /// Of a row, from what a thread has of it.
  __device__ __forceinline__ core::Softmax<float> row_state(const Tile& t, int half,
                                                            float reference, float& sum) const {
    if constexpr (!S::kEightBit) {
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
    }
    if constexpr (S::kScaled) {
      const float shift = scaled_.row_shift(t, query_of(t, half), head_of(t, half));
      return {reference - (S::kEightBit ? kEightBitOffset : 0.0F) + shift, sum};
    } else {
      return {reference * w_.to_base2, sum};
    }
  }

  Tile tile_;
  typename ConsumerState<K>::Rows scaled_;  ///< or unused
  ScoreSums<kN / 2, K.block_m / 16> sums_;  ///< the same
  typename ConsumerState<K>::Type w_;       ///< S, then P; the rows' softmax
  float o_[kAccumulators];
};

}  // namespace tessera::cuda::sm90
