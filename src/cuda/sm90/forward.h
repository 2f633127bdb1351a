// The forward pass on Hopper: FlashAttention-3's warp specialisation (Shah et al. 2024, section 3),
// one tile of block_m query rows after another on a grid of one block per multiprocessor.
//
// Warpgroup 0 produces (producer.h): one thread describes each tile and asks the copy engine for
// its Q and its blocks of keys and values, from the right (the diagonal) to the left, into rings.
// The other warpgroups consume, 64 rows each: S = Q K^T of a block is issued beside O += P V of the
// block before it, then P of the new block is made from S in registers. The stream of blocks does
// not end with a tile: the first S of the next tile is issued beside the last O of this one. The
// warpgroups take turns at issuing (a named barrier each), so that one multiplies while another is
// at its exponentials.
//
// The softmax shift of a row is a reference, the greatest score of the first block with one. It is
// raised only when weights turn out much larger than 1, so O is hardly ever rescaled
// (FlashAttention-4's lazy rescaling), and later blocks are weighed without a look for their
// maximum.
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/buffers.h"
#include "cuda/sm90/extras.h"
#include "cuda/sm90/fragment.h"
#include "cuda/sm90/params.h"
#include "cuda/sm90/producer.h"

namespace tessera::cuda::sm90 {

/// What a thread's weights of a block and row may add up to before the reference is raised; 16-bit
/// weights are as precise there as below 1.
inline constexpr float kMostPart = 4096.0F;
/// log2 of what a weight may reach before the same happens, where maxima are looked for.
inline constexpr float kSlack = 8.0F;

template <core::Kernel K>
class Consumer {
  using S = Shape<K>;
  using ScoreWgmma = ptx::Wgmma<S::kType, K.block_n>;
  using OutputWgmma = ptx::Wgmma<S::kType, K.head_dim_v>;
  static constexpr int kN = K.block_n;
  static constexpr bool kAll = K.extra == core::Extra::all;
  static constexpr bool kSoftcap = K.extra == core::Extra::softcap;
  /// The turn is passed when O is there, not when it has been issued: faster where two warpgroups
  /// take longer over weights than over products, slower where products are the limit.
  static constexpr bool kPassesLate =
      K.extra == core::Extra::none && K.head_dim == 64 && S::kGroups == 2;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, const Buffers<K>& shared,
                                      int group)
      : p(params),
        buffers(shared),
        group_(group),
        warp_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        leads_(threadIdx.x % 128 == 0),
        to_base2_(kAll       ? 1.0F
                  : kSoftcap ? params.score.pre * params.score.post
                             : params.score.pre),
        q_item_(S::kShares == 1 ? ~0U : static_cast<std::uint32_t>(group - S::kShares)) {}

  __device__ __forceinline__ void run() {
    if (group_ == S::kGroups - 1) pass_turn();
    if constexpr (kAll) {
      walk_with_extras();
    } else {
      core::KeyBlocks own;
      if (!next_tile(tile_, own)) return;
      start(own);
      for (;;) {
        walk(own);
        Tile next;
        if (!next_tile(next, own)) break;
        cross(next, own);
      }
      finish_output();
      write(tile_, reference_, sum_);
    }
  }

 private:
  // ---- turns ----

  __device__ __forceinline__ void take_turn() const { ptx::barrier_sync(1 + group_, 256); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::barrier_arrive(1 + (group_ + 1) % S::kGroups, 256);
  }

  // ---- products ----

  /// S = Q K^T of item_.
  __device__ __forceinline__ void issue_scores() {
    const std::uint32_t k = ptx::descriptor_along(buffers.k.buffer(item_));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < K.head_dim / 16; ++i) {
      const int chunk = i / 4, column = i % 4 * 32;
      const std::uint64_t keys = ptx::descriptor(k + (chunk * kN * 128 + column) / 16);
      if constexpr (S::kHoldsQueries) {
        ScoreWgmma::registers(s_, queries_ + 4 * i, keys, i != 0);
      } else {
        ScoreWgmma::shared(s_,
                           ptx::descriptor(q_descriptor_ + (chunk * K.q_rows * 128 + column) / 16),
                           keys, i != 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// O += P V of the item whose weights are the operand.
  __device__ __forceinline__ void issue_output() {
    const std::uint32_t v = ptx::descriptor_across(buffers.v.buffer(weighed_), kN * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      OutputWgmma::registers_across(o_, operand_ + 4 * i, ptx::descriptor(v + i * 16 * 128 / 16),
                                    1);
    }
    ptx::wgmma_commit();
  }

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

  /// Lets keys pass by, and with them this warpgroup's turns.
  __device__ __forceinline__ void skip_keys(int count) {
#pragma unroll 1
    for (; agreed(count > 0); --count) {
      ++item_;
      buffers.k.wait_full(item_);
      take_turn();
      if (leads_) buffers.k.release(item_);
      pass_turn();
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

  /// Values beyond the end of a packed sequence, where another one lies, become 0: their weights
  /// are 0, but that times infinity is not. Every warpgroup clears them for itself. Values beyond
  /// the end of a tensor are 0 as they come.
  __device__ __forceinline__ void clear_values(const Tile& t, const core::KeyBlocks& own) const {
    if constexpr (!K.any_layout) {
      const int valid = t.band.seqlen_k - (own.seen.end - 1) * kN;
      if (agreed(!p.sequences.packed() || valid >= kN)) return;
      buffers.v.wait_full(weighed_);
      const std::uint32_t v = buffers.v.buffer(weighed_);
      constexpr std::uint32_t kZeros[4] = {};
      // Softcap at d = 256 has no register left to keep the second form in.
      const int thread = kSoftcap ? warp_ * 32 + lane_ : static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
      for (int i = valid * 8 + thread; i < kN * 8; i += 128) {
        for (int c = 0; c < S::kChunksV; ++c) ptx::store_shared(v + (c * kN * 8 + i) * 16, kZeros);
      }
      ptx::fence_proxy_async();
      ptx::barrier_sync(1 + S::kGroups + group_, 128);
    }
  }

  // ---- a tile ----

  /// S and P of its first block, with nothing beside them.
  __device__ __forceinline__ void start(const core::KeyBlocks& own) {
    clear_output();
    reset_softmax();
    const int skipped = tile_.blocks_end - own.seen.end;
    skip_keys(skipped);
    ++item_;
    buffers.k.wait_full(item_);
    take_turn();
    issue_scores();
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(s_);
    release_keys(own.seen.size() == 1);
    weigh(tile_, own.seen.end - 1, own);
    make_operand();
    skip_values(skipped);
    clear_values(tile_, own);
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
    release_queries();
  }

  /// From the last block of tile_ to the first of the next one, which becomes tile_.
  __device__ __forceinline__ void cross(const Tile& next, const core::KeyBlocks& own) {
    const int skipped = next.blocks_end - own.seen.end;
    skip_keys(skipped);
    begin_step();
    release_keys(own.seen.size() == 1);
    const float reference[2] = {reference_[0], reference_[1]};
    float sum[2] = {sum_[0], sum_[1]};
    reset_softmax();
    weigh(next, own.seen.end - 1, own);
    finish_step();
    skip_values(skipped);
    clear_values(next, own);
    write(tile_, reference, sum);
    clear_output();
    tile_ = next;
  }

  // ---- all tiles of rows with extras ----

  /// A step with extras is long, so it is there once: for the first block of a tile, with the last
  /// O of the tile before beside it, and for all others. Before the first tile of all there is one
  /// without rows, and with weights of 0 for a buffer of values that nobody waits for or releases.
  __device__ __forceinline__ void walk_with_extras() {
    clear_output();
    reset_softmax();
    clear_operand();
    tile_.first_row = 0;
    core::KeyBlocks own;
    own.seen = {0, 0};
    for (int n = -1;; --n) {
      const bool crosses = agreed(n < own.seen.begin), begun = agreed(weighed_ != ~0U);
      bool more = true;
      Tile next = tile_;
      const float reference[2] = {reference_[0], reference_[1]};
      float sum[2] = {sum_[0], sum_[1]};
      if (crosses) {
        if (begun) release_queries();
        more = next_tile(next, own);
        n = own.seen.end - 1;
        reset_softmax();
      }
      const int skipped = crosses ? next.blocks_end - own.seen.end : 0;
      if (more) {
        skip_keys(skipped);
        begin_step(begun);
        release_keys(n == own.seen.begin);
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
          clear_values(next, own);
        }
        write(tile_, reference, sum);
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
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(o_);
  }

  // ---- a block of keys ----

  /// Issues S of the next item and O of the one before; returns when S is there. begun: there is
  /// one before.
  __device__ __forceinline__ void begin_step(bool begun = true) {
    ++item_;
    buffers.k.wait_full(item_);
    take_turn();
    issue_scores();
    if (begun) buffers.v.wait_full(weighed_);
    issue_output();
    if constexpr (!kPassesLate) pass_turn();
    ptx::wgmma_wait<K.any_layout ? 0 : 1>();
    ptx::wgmma_results(s_);
  }

  /// Waits for O and makes P the next operand.
  __device__ __forceinline__ void finish_step(bool begun = true) {
    take_output(begun);
    make_operand();
  }
  __device__ __forceinline__ void take_output(bool begun = true) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(o_);
    if constexpr (kPassesLate) pass_turn();
    if (begun && leads_) buffers.v.release(weighed_);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int n, bool last_of_tile) {
    begin_step();
    release_keys(last_of_tile);
    if constexpr (!kSoftcap) {
      if constexpr (kMasked) mask(tile_, n);
      take_output();
      weigh_at_once();
      return;
    }
    // Above head_dim 128 O takes so long that waiting for it first costs more than it saves.
    constexpr bool kNarrowFirst = !kMasked && K.head_dim <= 128;
    if constexpr (kNarrowFirst) {
      take_output();
      if (weigh_narrow()) return;
    }
    float top[2];
    const Raw raw = cap(top);
    if constexpr (kMasked) {
      mask(tile_, n);
      greatest_or_zero(top);
    }
    const bool rescales = soften(top, raw);
    if constexpr (!kNarrowFirst) take_output();
    make_operand();
    if (rescales) rescale();
  }

  /// P of S becomes the operand without a look for the greatest scores: references are raised only
  /// if weights turn out too large, and then the weights are made anew.
  __device__ __forceinline__ void weigh_at_once() {
    weighed_ = item_;
    float shift[2] = {reference_[0] * to_base2_, reference_[1] * to_base2_};
#pragma unroll 1
    for (std::uint32_t raised = ptx::opaque(0);; raised = ptx::opaque(1)) {
      float part[2];
      make_weights(shift, part, [&](float x, float y) { return fmaf(x, to_base2_, -y); });
      if (!agreed(raised == 0 && too_large(part))) {
        sum_[0] += part[0];
        sum_[1] += part[1];
        return;
      }
      float top[2];
      greatest(top);
      raise(top);
      rescale();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[half] = core::shift_of(reference_[half]) * to_base2_;
      }
    }
  }

  /// The same of raw products for which the softcap's short series is good. False: it is not, or
  /// weights turn out too large; only the operand has changed.
  __device__ __forceinline__ bool weigh_narrow() {
    const float shift[2] = {reference_[0] * to_base2_, reference_[1] * to_base2_};
    float part[2];
    float farthest = 0.0F;  // square; NaNs are beyond all limits
    make_weights(shift, part, [&](float x, float y) {
      farthest = __int_as_float(max(__float_as_int(farthest), __float_as_int(x * x)));
      return p.series.narrow(x) - y;
    });
    const float limit = p.series.narrow_limit;
    const bool narrow = __float_as_int(farthest) <= __float_as_int(limit * limit) && limit > 0.0F;
    if (agreed(!narrow || too_large(part))) return false;
    weighed_ = item_;
    sum_[0] += part[0];
    sum_[1] += part[1];
    return true;
  }

  /// exponent(score, shift): the operand becomes its powers of 2; part: their sums. A row without a
  /// reference has a shift of -inf and gets +inf or, for a masked score, NaN.
  template <class Exponent>
  __device__ __forceinline__ void make_weights(const float (&shift)[2], float (&part)[2],
                                               const Exponent& exponent) {
    part[0] = part[1] = 0.0F;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      float weight[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weight[j] = ptx::ex2(exponent(s_[i + j], shift[i / 2 % 2]));
        part[i / 2 % 2] += weight[j];
      }
      operand_[i / 2] = ptx::pack<S::kType>(weight[0], weight[1]);
    }
  }
  __device__ __forceinline__ static bool too_large(const float (&part)[2]) {
    return !(part[0] < kMostPart && part[1] < kMostPart);
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] *= factor_[i / 2 % 2];
  }

  /// S of the n-th block, any of those of tile t, becomes P. True: O must be rescaled.
  __device__ __forceinline__ bool weigh(const Tile& t, int n, const core::KeyBlocks& own) {
    float top[2];
    const Raw raw = cap(top);
    if (agreed(n >= own.full.end || n < own.full.begin)) mask(t, n);
    greatest_or_zero(top);
    return soften(top, raw);
  }

  // ---- scores to weights; score i of a thread: query row_of(i), key key_of(n, i) ----

  __device__ __forceinline__ int row_in_tile(int half) const {
    return group_ * kRows + warp_ * 16 + lane_ / 4 + 8 * half;
  }
  __device__ __forceinline__ int row_of(const Tile& t, int half) const {
    return t.first_row + row_in_tile(half);
  }

  __device__ __forceinline__ int query_of(const Tile& t, int half) const {
    return p.rows.query_of(row_of(t, half));
  }

  __device__ __forceinline__ int key_of(int n, int i) const {
    return n * kN + i / 4 * 8 + lane_ % 4 * 2 + i % 2;
  }

  __device__ __forceinline__ void mask(const Tile& t, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::Range keys = t.band.keys_of(query_of(t, half));
      const int first = n * kN + lane_ % 4 * 2;
      mask_row(s_, half, {keys.begin - first, keys.end - first}, -core::kInfinity);
    }
  }

  /// The scores are still raw products, for which that series is good: both where `narrow` is.
  /// Neither: they lack only to_base2_.
  struct Raw {
    bool narrow, wide;
  };

  /// Softcap: looks for the series that is good for all of the warp, and caps the scores at once if
  /// there is none: tanh(pre x) / pre, which is no larger than x and still lacks to_base2_. The
  /// greatest scores come with it, from the same bits.
  __device__ __forceinline__ Raw cap(float (&top)[2]) {
    if constexpr (!kSoftcap) return {false, false};
    greatest_or_zero(top);
    // Of negative floats the least has the greatest bits. NaNs are beyond all limits.
    std::uint32_t low[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      std::uint32_t& x = low[i / 2 % 2];
      x = __vimax3_u32(x, __float_as_uint(s_[i]), __float_as_uint(s_[i + 1]));
    }
    const int least = static_cast<int>(core::max(low[0], low[1]) & 0x7FFFFFFF);
    const int farthest = __vimax3_s32(__float_as_int(top[0]), __float_as_int(top[1]), least);
    const bool narrow = !agreed(farthest > __float_as_int(p.series.narrow_limit));
    const bool wide = !agreed(farthest > __float_as_int(p.series.wide_limit));
    if (!wide) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s_[i] = tanh_of(s_[i]) * (1.0F / p.score.pre);
      greatest_or_zero(top);
    }
    return {narrow, wide};
  }

  /// Of the softcap. tanh(x) = 1 - 2 / (e^2x + 1), right at both ends.
  __device__ __forceinline__ float tanh_of(float product) const {
    const float e = ptx::ex2(2.0F * core::kLog2e * p.score.pre * product);
    return 1.0F - 2.0F * ptx::rcp(e + 1.0F);
  }

  /// Softcap, bias and ALiBi: raw products become base-2 scores (S1).
  __device__ __forceinline__ void transform(const Tile& t, int n) {
    if (p.score.capped) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s_[i] = tanh_of(s_[i]) * p.score.post;
    } else {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s_[i] *= p.score.pre;
    }
    const int query = row_of(t, 0), key = key_of(n, 0);
    if (p.bias != nullptr) {
      const int keys = t.band.seqlen_k - key, queries = t.band.seqlen_q - query;
      const std::int64_t start =
          t.batch * p.bias_batch + t.head * p.bias_head + query * p.bias_query + key * p.bias_key;
      add_bias({p.bias,
                p.bias_dtype,
                start,
                p.bias_query,
                p.bias_key,
                {0 < queries ? keys : 0, 8 < queries ? keys : 0}},
               s_);
    }
    if (p.alibi_slopes != nullptr) {
      const float slope = p.alibi_slopes[(p.alibi_per_batch ? t.batch * p.work.heads : 0) + t.head];
      add_alibi<1>(slope, query + t.band.seqlen_k - t.band.seqlen_q - key, s_);
    }
  }

  /// Dropout of P (S8); the sum has been taken. A quad's pairs of neighbouring keys share a call:
  /// each of its lanes makes every fourth one, and they exchange words.
  __device__ __forceinline__ void drop(const Tile& t, int n) {
    if (!p.dropout.active()) return;
    static_assert(kN <= 64);
    std::uint32_t kept = 0;  // bit i: of s_[i]
#pragma unroll 2
    for (int first = 0; first < kN / 4; first += 4) {
      const int pair = first + lane_ % 4;
      core::Philox4<std::uint32_t> random = core::dropout_bits<std::uint32_t>(
          p.dropout, t.batch, t.head, row_of(t, pair % 2), n * kN / core::kPhiloxKeys + pair / 2);
      transpose_in_quad(lane_, random.word);
      std::uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((random.word[i] & 0xFFFF) >= p.dropout.threshold) bits |= 1U << 2 * i;
        if (random.word[i] >> 16 >= p.dropout.threshold) bits |= 2U << 2 * i;
      }
      kept |= bits << 2 * first;
    }
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      s_[i] = (kept >> i & 1) != 0 ? s_[i] * p.dropout.keep_scale : 0.0F;
    }
  }

  /// S becomes P, and the softmax state follows. True: what O holds must be multiplied by factor_.
  /// top: of greatest_or_zero(). Raw products serve as well there: they are no smaller than scores.
  __device__ __forceinline__ bool soften(float (&top)[2], Raw raw) {
    bool raises = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raises |= (top[half] - reference_[half]) * to_base2_ > kSlack;
    }
    raises = agreed(raises);
    if (raises) {
      over_quad(top);
      if (agreed(top[0] == 0.0F || top[1] == 0.0F)) greatest(top);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (raw.wide) top[half] = p.series.wide(top[half]) / to_base2_;
      }
      raise(top);
    }
    if (raw.narrow) {
      weigh_by([this](float x, float shift) { return p.series.narrow(x) - shift; });
    } else if (raw.wide) {
      weigh_by([this](float x, float shift) { return p.series.wide(x) - shift; });
    } else {
      weigh_by([this](float x, float shift) { return fmaf(x, to_base2_, -shift); });
    }
    return raises;
  }

  /// References become the rows' greatest scores, where these are greater; what goes by them
  /// follows, but for O.
  __device__ __forceinline__ void raise(const float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(top[half], reference_[half]);
      factor_[half] =
          raised == -core::kInfinity ? 1.0F : ptx::ex2((reference_[half] - raised) * to_base2_);
      reference_[half] = raised;
      sum_[half] *= factor_[half];
    }
  }

  /// exponent: base-2 scores, less the shift, of S. A block's weights are added up apart: one long
  /// sum of equal weights, as a softcap makes them, would err by more.
  template <class Exponent>
  __device__ __forceinline__ void weigh_by(const Exponent& exponent) {
    float shift[2], part[2] = {0.0F, 0.0F};
#pragma unroll
    for (int half = 0; half < 2; ++half) shift[half] = core::shift_of(reference_[half]) * to_base2_;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      s_[i] = ptx::ex2(exponent(s_[i], shift[i / 2 % 2]));
      part[i / 2 % 2] += s_[i];
    }
    sum_[0] += part[0];
    sum_[1] += part[1];
  }

  /// The greatest of the thread's scores in each row, or 0 if there is none above: floats that are
  /// not negative have the order of their bits, and of three integers one instruction takes the
  /// greatest.
  __device__ __forceinline__ void greatest_or_zero(float (&top)[2]) const {
    int bits[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      int& x = bits[i / 2 % 2];
      x = __vimax3_s32(x, __float_as_int(s_[i]), __float_as_int(s_[i + 1]));
    }
    top[0] = __int_as_float(bits[0]);
    top[1] = __int_as_float(bits[1]);
  }

  __device__ __forceinline__ void greatest(float (&top)[2]) const {
    top[0] = s_[0];
    top[1] = s_[2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s_[i]);
    over_quad(top);
  }

  __device__ __forceinline__ static void over_quad(float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 2));
    }
  }

  /// P in the storage type is the A operand as it lies: neighbouring groups of columns in pairs.
  __device__ __forceinline__ void make_operand() {
    weighed_ = item_;
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) operand_[i] = ptx::pack<S::kType>(s_[2 * i], s_[2 * i + 1]);
  }

  __device__ __forceinline__ void reset_softmax() {
    reference_[0] = reference_[1] = -core::kInfinity;
    sum_[0] = sum_[1] = 0.0F;
  }
  __device__ __forceinline__ void clear_operand() {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) operand_[i] = 0;
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] = 0.0F;
  }

  // ---- tiles and results ----

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
    q_descriptor_ = ptx::opaque(ptx::descriptor_along(queries()));
  }

  /// This warpgroup's queries in shared memory.
  __device__ __forceinline__ std::uint32_t queries() const {
    return buffers.q.buffer(q_item_) + (S::kShares == 1 ? group_ * kRows * 128 : 0);
  }

  /// Every step's operand: 16 rows of a warp and 16 columns, in units of eight columns.
  __device__ __forceinline__ void hold_queries() {
    if constexpr (S::kHoldsQueries) {
      const std::uint32_t row = warp_ * 16 + lane_ % 16, line = queries() + row * 128;
#pragma unroll
      for (int i = 0; i < K.head_dim / 16; ++i) {
        const std::uint32_t unit = (i % 4 * 2 + lane_ / 16) ^ row % 8;
        ptx::load_matrices(queries_ + 4 * i, line + i / 4 * K.q_rows * 128 + unit * 16);
      }
    }
  }

  /// Rows that see no key (S4); with a sink its logit is all the denominator.
  __device__ __forceinline__ void write_zeros(const Tile& t) const {
    const float lse = p.sink == nullptr ? -core::kInfinity : p.sink[t.head];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = row_exists(t, half);
      store_lse(t, half, exists, lse);
      std::uint16_t* const to = output_of(t, half);
      const int end = exists ? p.head_dim_v - store_column(lane_) : 0;
      for (int c = 0; c < K.head_dim_v; c += 16) {
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
  __device__ __forceinline__ void store_lse(const Tile& t, int half, bool exists, float x) const {
    ptx::store_if(
        exists && p.softmax_lse != nullptr && lane_ % 4 == 0,
        p.softmax_lse + t.softmax_lse + member_of(t, half) * p.lse_head + query_of(t, half), x);
  }
  __device__ __forceinline__ std::uint16_t* output_of(const Tile& t, int half) const {
    return static_cast<std::uint16_t*>(p.o) + t.o + query_of(t, half) * p.o_strides.seqlen +
           member_of(t, half) * p.o_strides.head + store_column(lane_);
  }

  __device__ __forceinline__ void write(const Tile& t, const float (&reference)[2],
                                        float (&sum)[2]) const {
    const float sink = p.sink == nullptr ? 0.0F : p.sink[t.head];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0U, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0U, sum[half], 2);
      const core::Softmax<float> row = {reference[half] * to_base2_, sum[half]};
      core::Softmax<float> merged = row;
      float scale = core::inverse_sum(row);
      if (p.sink != nullptr) {
        merged = core::combine(row, {sink * core::kLog2e, 1.0F});
        scale = core::weight_of({row.max, 1.0F}, merged);
      }
      const bool exists = row_exists(t, half);
      store_lse(t, half, exists, core::lse_of(merged));
      store_row<S::kType, K.any_layout>(o_, half, scale, exists, lane_, p.head_dim_v,
                                        output_of(t, half));
    }
  }

  const ForwardParams& p;
  const Buffers<K>& buffers;
  const int group_;  ///< of the consumers
  const int warp_;   ///< of the warpgroup
  const int lane_;
  const bool leads_;  ///< arrives at barriers for its warpgroup
  const float to_base2_;

  Tile tile_;
  std::uint32_t q_item_;        ///< in the ring of Q
  std::uint32_t q_descriptor_;  ///< of this warpgroup's queries in it
  std::uint32_t item_ = ~0U;    ///< in the ring of K: whose scores come next
  std::uint32_t weighed_ =
      ~0U;  ///< in the ring of V: whose weights are the operand, still to be multiplied
  std::uint32_t queries_[S::kHoldsQueries ? K.head_dim / 4 : 1];  ///< as operands, or unused
  float s_[kN / 2];
  float o_[K.head_dim_v / 2];
  std::uint32_t operand_[kN / 4];
  float reference_[2], sum_[2], factor_[2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void forward(const ForwardParams& p, char* shared) {
  using S = Shape<K>;
  const Buffers<K> buffers(shared);
  // Told to be the same for the whole warp.
  const int group = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) buffers.initialise();
  __syncthreads();
  if (group == 0) {
    ptx::lower_registers<S::kProducerRegisters>();
    if (threadIdx.x < S::kProducers) Producer<K>(p, buffers).run();
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    Consumer<K>(p, buffers, group - 1).run();
  }
}

}  // namespace tessera::cuda::sm90
