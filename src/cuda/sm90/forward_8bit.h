// What a consumer of the Hopper forward kernel (forward.h) does besides where tensors have 8 bits
// (S14): scales; and where values have them, sums that are promoted.
//
// wgmma adds products of 8 bits to an accumulator that keeps 13 fraction bits of its greatest term,
// so a sum of many keys loses the small ones (docs/correctness.md). After some blocks of keys the
// accumulators are therefore added to sums in shared memory (promoted_sums.h), and begin again.
// What raised references ask of those sums waits until they are added to next.
#pragma once

#include "cuda/ptx/memory.h"
#include "cuda/sm90/forward_buffers.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/sm90/promoted_sums.h"
#include "cuda/sm90/staged_rows.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softmax.h"
#include "cuda/tile/softmax_8bit.h"
#include "cuda/tile/softmax_i8.h"

namespace tessera::cuda::sm90 {

/// What makes scores of products besides scales of queries and keys.
template <core::Kernel K>
__device__ __forceinline__ float scale_factor(const ForwardParams& p) {
  return K.extra == core::Extra::softcap ? 2.0F * core::kLog2e * p.score.pre : p.score.pre;
}

/// Scales of queries and keys.
template <core::Kernel K>
class ScaledRows {
 protected:
  static constexpr int kN = K.block_n;
  static constexpr bool kCapped = K.extra == core::Extra::softcap;
  /// Where the keys' scales lie is in registers. Else it is looked up at every step, before its
  /// turn to issue: no warp of the warpgroup passes that without the others, so nobody has let go
  /// of it.
  static constexpr bool kKeepsScales = !rounds_promoted(K);

 public:
  __device__ __forceinline__ ScaledRows(const ForwardParams& params, std::uint32_t /*promoted*/,
                                        int /*group*/)
      : p(params) {}

  /// Those of a tile's sequence and head, and of its rows: row_of(half) is a query, head_of(half)
  /// its head.
  template <class State, class QueryOf, class HeadOf>
  __device__ __forceinline__ void take_scales(const Tile& t, const TileScales& scales, State& w,
                                              const QueryOf& query_of, const HeadOf& head_of) {
    if constexpr (kKeepsScales) k_scales_ = scales.k;
    const float first_k = scales.first_k, q = scales.q;
#pragma unroll
    for (int i = 0; i < kN / State::kScaledKeys; ++i) w.key_scale[i] = first_k;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w.row_scale[half] = q;
      w.row_shift[half] = 0.0F;
    }
    if (agreed(p.q_scale.by != Scaling::token && !(kCapped && p.score_shift))) return;
    const core::Sequence sequence = p.sequences.at(t.batch);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows past the sequence's end go with its last one.
      const int query = core::min(query_of(half), sequence.seqlen_q - 1), head = head_of(half);
      if (p.q_scale.by == Scaling::token) {
        w.row_scale[half] = scale_factor<K>(p) * p.q_scale.of(sequence, head)[query];
      }
      if (kCapped && p.score_shift) {
        w.row_shift[half] = scale_factor<K>(p) * p.score_shift.of(sequence, head)[query];
      }
    }
  }

  /// Asks for the scales of the n-th block's keys. A thread asks by a key of its own: of what is
  /// the same for the whole warp the compiler would wait before the products are issued, to have it
  /// in uniform registers. Keys past the end, which nobody sees, have the last one's scale.
  template <class State>
  __device__ __forceinline__ void ask(const Tile& t, int n, const TileScales& scales,
                                      State& w) const {
    // Where it is one for a block, to ask takes less than to find out whether there is one of its
    // own; it takes a register more.
    if constexpr (!core::shares_scale(K) || rounds_promoted(K)) {
      if (agreed(p.k_scale.by != Scaling::block)) return;
    }
    const float* const k_scales = kKeepsScales ? k_scales_ : scales.k;
#pragma unroll
    for (int i = 0; i < kN / State::kScaledKeys; ++i) {
      const int own = n * kN + i * State::kScaledKeys + static_cast<int>(threadIdx.x) % 4 * 2;
      const int key = core::shares_scale(K) ? own : core::min(own, t.band.seqlen_k - 1);
      w.key_scale[i] = k_scales[p.k_scale_block.quotient(key)];
    }
  }

  /// What smoothing of keys took off the scores of a row, in base 2: of no account but in lse and
  /// beside a sink. Capped scores have it already.
  __device__ __forceinline__ float row_shift(const Tile& t, int query, int head) const {
    if (kCapped || !p.score_shift) return 0.0F;
    const core::Sequence sequence = p.sequences.at(t.batch);
    const int at = core::min(query, sequence.seqlen_q - 1);
    return p.score.pre * p.score_shift.of(sequence, head)[at];
  }

 protected:
  const ForwardParams& p;

 private:
  const float* k_scales_ = nullptr;
};

/// The same, and scales and sums of values.
template <core::Kernel K>
class EightBitRows : public ScaledRows<K> {
  using Base = ScaledRows<K>;
  using Base::kN;
  using Base::p;
  static constexpr int kColumns = K.head_dim_v;  ///< of O; behind them its sums of weights

 public:
  /// O, and two equal sums of weights of each of a thread's rows.
  static constexpr int kAccumulators = (kColumns + core::ValueTiles::kOnes) / 2;

  __device__ __forceinline__ EightBitRows(const ForwardParams& params, std::uint32_t promoted,
                                          int group)
      : Base(params, promoted, group), promoted_(promoted, group) {}

  /// By block: what the accumulators of tile t's n-th block and those of its interval are
  /// multiplied by.
  __device__ __forceinline__ float part_scale(const Tile& t, int n) const {
    const float* const scales = p.v_scale.of(p.sequences.at(t.batch), p.group.quotient(t.head));
    return scales[p.v_scale_block.quotient(n * kN)];
  }

  // ---- sums ----

  /// Of a tile whose last block will be the n-th, and of which nothing has been added so far.
  __device__ __forceinline__ void begin(int n) {
    last_block_ = n;
    begins_ = true;
    any_ = false;
    pending_[0] = pending_[1] = 0.0F;
    sum_[0] = sum_[1] = 0.0F;
  }
  /// Whether the next product begins the accumulators, of which it asks once.
  __device__ __forceinline__ bool begins() {
    const bool begins = begins_;
    begins_ = false;
    return begins;
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    pending_[0] *= factor[0];
    pending_[1] *= factor[1];
  }
  /// The n-th block has been added to o: it may be the last of its interval.
  __device__ __forceinline__ void promote_after(const Tile& t, int n, float (&o)[kAccumulators]) {
    if (agreed(goes_on(n))) return;
    sum_up(t, n, o);
    if constexpr (stages_rows(K)) StagedRows<K>::await();
    promoted_.keep(o);
    any_ = true;
    pending_[0] = pending_[1] = 1.0F;
    if constexpr (rounds_promoted(K)) {
      // What is left there will be multiplied by the scale of the next interval, block n - 1's.
      if (agreed(p.v_scale.by == Scaling::block)) {
        const float scale = part_scale(t, n - 1), inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) o[i] *= inverse;
      }
#pragma unroll
      for (int i = kColumns / 2; i < kAccumulators; ++i) o[i] = 0.0F;
    } else {
      begins_ = true;
    }
  }
  /// o becomes the sum over all of tile t's blocks, and `sum` that of the weights.
  __device__ __forceinline__ void finish(const Tile& t, float (&o)[kAccumulators],
                                         float (&sum)[2]) {
    sum_up(t, last_block_, o);
    sum[0] = sum_[0];
    sum[1] = sum_[1];
  }

  // ---- results ----

  /// The warp's rows on their way out. The sums have been added to o.
  __device__ __forceinline__ StagedRows<K> staged() const {
    const std::uint32_t lane = ptx::opaque(threadIdx.x) % 32;
    return {promoted_.warp_part(lane), lane};
  }

  /// What is left of values' scales: a factor of all of o. Those by column, and shifts, are done to
  /// o, whose rows' weights add up to `sum`. scale: that of all values, or 1.
  __device__ __forceinline__ float scale_values(const Tile& t, float scale, const float (&sum)[2],
                                                float (&o)[kAccumulators]) const {
    const core::Sequence sequence = p.sequences.at(t.batch);
    const int head_k = p.group.quotient(t.head), first = static_cast<int>(threadIdx.x) % 4 * 2;
    if (agreed(p.v_scale.by == Scaling::channel)) {
      for_columns(p.v_scale.of(sequence, head_k), first, [&](int i, float scale) {
        o[i] *= scale;
        o[i + 2] *= scale;
      });
    }
    if (agreed(!p.v_shift)) return scale;
    for_columns(p.v_shift.of(sequence, head_k), first, [&](int i, float shift) {
      o[i] = fmaf(sum[0], shift, o[i] * scale);
      o[i + 2] = fmaf(sum[1], shift, o[i + 2] * scale);
    });
    return 1.0F;
  }

 private:
  /// Whether sums go on after the n-th block, as they are.
  __device__ __forceinline__ bool goes_on(int n) const {
    if constexpr (core::shares_scale(K)) return n % core::promoted_blocks(K, 0) != 0;
    return (n & p.promotion) != 0;
  }
  /// o becomes the sum over all of tile t's blocks down to the n-th, and sum_ that of their
  /// weights, of which the accumulators have two for each row.
  __device__ __forceinline__ void sum_up(const Tile& t, int n, float (&o)[kAccumulators]) {
    if (agreed(p.v_scale.by == Scaling::block)) {
      const float scale = part_scale(t, n);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) o[i] *= scale;
    }
    if (agreed(any_)) promoted_.add_to(o, pending_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] = fmaf(sum_[half], pending_[half], o[kColumns / 2 + 2 * half]);
    }
  }
  /// body(i, number): the number of the column that o[i] and o[i + 2] are in, for all of the
  /// thread's.
  template <class Body>
  __device__ __forceinline__ void for_columns(const float* numbers, int first,
                                              const Body& body) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = first + i * 2 + j;
        body(i + j, ptx::load_in_order_if(column < p.head_dim_v, numbers + column));
      }
    }
  }

  const PromotedSums<K> promoted_;
  int last_block_ = 0;  ///< of the tile, the leftmost
  float pending_[2];    ///< what the promoted sums must still be multiplied by
  float sum_[2];        ///< of weights, promoted
  bool any_ = false;    ///< there are promoted sums
  bool begins_ = true;
};

/// A consumer's softmax, what it knows of scales, and how many accumulators its O has.
template <core::Kernel K, bool kScaled = has_scales(K), bool kEightBit = is_eight_bit(K)>
struct ConsumerState {
  using Type = Weights<core::dtype_of(K.operand), K.block_n>;
  using Rows = ScaledRows<K>;  ///< unused
  static constexpr int kAccumulators = own_dim_v(K) / 2;
};
template <core::Kernel K>
struct ConsumerState<K, true, false> {
  using Type = IntegerWeights<core::dtype_of(K.operand), K.block_n, K.extra == core::Extra::softcap,
                              core::first_scores(K), held_scores(K), core::scaled_keys(K)>;
  using Rows = ScaledRows<K>;
  static constexpr int kAccumulators = own_dim_v(K) / 2;
};
template <core::Kernel K>
struct ConsumerState<K, true, true> {
  using Type = EightBitWeights<K.block_n, K.extra == core::Extra::softcap, core::first_scores(K),
                               held_scores(K), core::scaled_keys(K)>;
  using Rows = EightBitRows<K>;
  static constexpr int kAccumulators = Rows::kAccumulators;
};

}  // namespace tessera::cuda::sm90
