// What the consumers of the Hopper backward kernel have in common where each has a role
// (backward_wide.h, backward_exchange.h): the tile, the products, P and dS, the results.
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/backward_buffers.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/backward_turns.h"
#include "cuda/sm90/piece.h"
#include "cuda/sm90/products.h"
#include "cuda/sm90/score_sums.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::sm90 {

enum class Role : std::uint8_t { values, keys };

/// What the steps of both kinds are made of. The "sum" is dV or dK, "scores" are S^T, then P^T, or
/// dP^T, then dS^T.
template <core::Kernel K, Role kRole>
class RoleConsumer {
 protected:
  using S = BackwardShape<K>;
  static constexpr bool kValues = kRole == Role::values;
  static constexpr bool kExtras = K.extra == core::Extra::all;
  static constexpr int kM = K.block_m, kN = S::kKeys;
  static constexpr int kScoreDim = kValues ? S::kDim : S::kDimV;
  static constexpr int kSumDim = kValues ? S::kDimV : S::kDim;
  static constexpr int kSumChunks = kValues ? S::kChunksV : S::kChunks;
  // Pieces of dQ that the block sums: the keys, who wait for the values, take the odd one.
  static constexpr bool kExchange = exchanges(K);
  static constexpr int kPieces = kExchange ? S::kChunks / 2 : S::kChunks;
  static constexpr int kFirstPiece = kValues ? 0 : kPieces / 2;
  static constexpr int kLastPiece = (kValues ? kPieces / 2 : kPieces) - 1;
  using ScoreWgmma = ptx::Wgmma<S::kType, kM>;
  using SumWgmma = ptx::Wgmma<S::kType, kSumDim>;
  using QueryWgmma = ptx::Wgmma<S::kType, 64>;

  // Named barriers. Two order all that the warpgroups hand over. Who passes kWeightsReady of a step
  // knows that the values are done with dQ of the step before the last, so that dS^T, in two
  // buffers, may be written; who passes kScoresReady knows that P^T has been read. The producer's
  // threads have the first one.
  static constexpr int kWeightsReady = 2, kScoresReady = 3;
  static constexpr int kOwn = kValues ? 4 : 5;  ///< of this warpgroup
  static constexpr int kBoth = 2 * 128;         ///< threads

  /// Whether what is said of a tile is read anew each time: registers are scarcer still, and of a
  /// pair of blocks there is none left.
  static constexpr bool kPair = shares_columns(K);
  static constexpr bool kScarce = kPair || S::kDim + S::kDimV > 384;

  static_assert(kM == 64 && kN == 64 && (kExtras || (K.q_stages >= 2 && !K.any_layout)));

  __device__ __forceinline__ RoleConsumer(const BackwardParams& params,
                                          const BackwardBuffers<K>& shared)
      : p(params),
        buffers(shared),
        warp_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        lane_(threadIdx.x % 32),
        leads_(threadIdx.x % 128 == 0),
        sums_(shared.score_sums, shared.score_sums_full, shared.other(),
              (kValues ? 0 : 4) + warp_) {}

  /// All tiles; consumer: what derives from this.
  template <class Consumer>
  __device__ __forceinline__ void run(Consumer& consumer) {
    while (next_tile()) {
#pragma unroll
      for (int i = 0; i < kSumDim / 2; ++i) sum_[i] = 0.0F;
      clear_keys();
      if constexpr (!kValues) buffers.v.wait_full(tile_item_);
      if (agreed(tile().steps > 0)) consumer.walk();
      write();
      if constexpr (K.cluster > 1) __syncwarp();
    }
  }

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
    if constexpr (kExchange) return clear_pair(valid);
    if (K.any_layout || agreed(!p.sequences.packed() || valid >= kN)) return;
    clear_rows<kN>(buffers.k.buffer(tile_item_), S::kChunks, valid);
    after_clearing();
  }
  /// The same of keys of which the other block has half.
  __device__ __forceinline__ void clear_pair(int valid) const {
    if (agreed(!p.sequences.packed() || valid >= 2 * kN)) return;
    const auto existing = [](int keys) { return core::min(core::max(keys, 0), kN); };
    const int others = valid + buffers.first_own_key() - buffers.first_other_key();
    clear_rows<kN>(buffers.k.buffer(tile_item_), S::kChunks, existing(valid));
    clear_rows<kN>(buffers.other_keys, S::kChunks / 2, existing(others));
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
  template <class Consumer>
  __device__ __forceinline__ void walk_rows(Consumer& consumer) {
    issue_scores(item_);
    ptx::wgmma_wait<0>();
    take_scores();
    const core::QueryBlocks& blocks = queries_of_tile();
    int member = tile().first_step.member, m = tile().first_step.block;
    for (;; ++member) {
      const int kept = kPair ? 0 : tile().end_of(member);
      const auto end = [&] { return kPair ? tile().end_of(member) : kept; };
      while (m < end()) {
        const int masked_end = m < blocks.full.begin ? core::min(blocks.full.begin, end())
                               : m < blocks.full.end ? m
                                                     : end();
#pragma unroll 1
        for (; m < masked_end; ++m) consumer.template step<true, false>(m);
        const int full_end = core::min(blocks.full.end, end());
#pragma unroll 1
        for (; m < full_end; ++m) consumer.template step<false, false>(m);
      }
      if (agreed(member == tile().last_step.member)) break;
      m = blocks.seen.begin;
    }
    consumer.template step<true, true>(m);
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
    if constexpr (kPair) sums_.add(scores_);
  }

  /// dV += P^T dO or dK += dS^T Q.
  __device__ __forceinline__ void issue_sum() {
    add_across<SumWgmma, kM>(sum_, operand_,
                             ptx::descriptor_across(operand_of(summed(), item_), kM * 128));
  }

  /// A piece of dQ = dS K over kN keys, of which b are columns; or, add: the same to what is there.
  /// a, b: descriptors (descriptor_across).
  __device__ __forceinline__ void multiply_keys(std::uint32_t a, std::uint32_t b, bool add) {
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      QueryWgmma::shared_across(dq_, ptx::descriptor(a + i * 16 * 128 / 16),
                                ptx::descriptor(b + i * 16 * 128 / 16), add || i != 0);
    }
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
  /// Where this thread's part of the first piece of an item's dQ goes.
  __device__ __forceinline__ float* first_piece(std::uint32_t item) const {
    const int piece = buffers.block() * kPieces + kFirstPiece;
    return p.rows.dq_at(turns().order(item).index) + piece * kPieceFloats +
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
  float dq_[32];  ///< a piece of dQ
  float sum_[kSumDim / 2];
  ScoreSums<kM / 2, 2 * 4> sums_;  ///< of S^T or dP^T; of a cluster only
};

}  // namespace tessera::cuda::sm90
