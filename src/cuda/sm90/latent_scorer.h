// Who makes the weights of the latent kernel (latent.h) where values are of 8 bits: one warpgroup,
// or two that take blocks of keys in turn. Each makes a block's scores by itself
// (latent_products.h), and what rows' weights are powers of two of goes from one to the other.
//
// A key's scales by groups of columns are multiplied with weights, which each group has of its own
// (16 rows). Where there are too many rows for that, weights are multiplied by the greatest scale
// of their key, and owners of outputs are told each group's share of it. Weights of fp16 lack a
// power of two, which is at least the greatest scale so far.
#pragma once

#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/sm90/latent_products.h"

namespace tessera::cuda::sm90 {

/// Weights of fp16 begin there, and end long before fp16 does.
inline constexpr float kLatentOffset = 0x1p7F;

template <core::Kernel K>
class LatentScorer : LatentKeyProducts<K> {
  using Scores = LatentScores<K>;
  using Scores::kKeys, Scores::kN, Scores::kRowsOfThread;
  using Scores::p, Scores::shared_, Scores::piece, Scores::warp, Scores::lane;
  using Scores::s_, Scores::row_of, Scores::first_row;
  using Products = LatentKeyProducts<K>;
  using Products::scale_at, Products::scales_of, Products::greatest, Products::inverse;
  static constexpr int kScorers = core::decode_scorers(K), kThreads = kScorers * 128;
  static constexpr int kWeights = latent_weights(K);
  static constexpr int kAtOnce = Products::kPreparedAtOnce;
  /// Sums of weights that a thread has: of all its rows, or where they are many of two of them,
  /// over all keys of the warp.
  static constexpr bool kGathers = kN == 64 && !latent_chunked(K);
  static constexpr int kSums = kGathers ? 2 : kRowsOfThread;

 public:
  __device__ __forceinline__ LatentScorer(const mma::DecodeParams& params, LatentShared<K>& shared)
      : Products(params, shared), scorer_(__shfl_sync(~0U, threadIdx.x / 128 - 2, 0)) {}

  __device__ __forceinline__ void run() {
    if (lane() == 0) memory() = {};
    __syncwarp();
#pragma unroll 1
    for (bool more = shared_.exists; agreed(more); more = walk().advance(piece())) {
      begin();
#pragma unroll 1
      for (int tile = piece().tiles.begin; agreed(tile < piece().tiles.end); ++tile) {
        if (agreed(makes(tile))) make(tile);
        ++item_;
      }
      end();
    }
  }

 private:
  // Named barriers.
  static constexpr int kOwn = 3;   ///< and the next: of a warpgroup alone
  static constexpr int kMeet = 6;  ///< of all who make weights
  static constexpr int kTurn = 7;  ///< and the next: shifts are those of a warpgroup's block

  // Made anew each time: there are few registers.

  __device__ __forceinline__ LatentMemory& memory() const {
    return shared_.roles.scorers[thread() / 32];
  }
  __device__ __forceinline__ mma::DecodeWalk<K> walk() const {
    return {p, shared_.search, shared_.span_length};
  }
  __device__ __forceinline__ LatentRings<K> rings() const { return LatentRings<K>(shared_); }
  __device__ __forceinline__ LatentTold<K>& told(std::uint32_t item) const {
    return shared_.told[item % latent_weight_stages(K)];
  }
  /// Whether the block is this warpgroup's. Counted in the piece: so sums do not depend on what
  /// lies before it (S9).
  __device__ __forceinline__ bool makes(int tile) const {
    return static_cast<std::uint32_t>(tile - piece().tiles.begin) % kScorers == scorer_;
  }
  /// Of all who make weights.
  __device__ __forceinline__ static int thread() { return Scores::thread() - 256; }

  // ---- pieces ----

  /// Queries become what is multiplied: each warp makes some rows.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float& sum : sum_) sum = 0.0F;
    if (thread() < kN) shared_.shift.set(thread(), -core::kInfinity);
    constexpr std::uint32_t kLeast = 27U << 23;  // 2^-100
    if (thread() == 0) shared_.roles.top = __uint_as_float(kLeast);
    if (piece().tiles.empty()) return;
    if (lane() == 0) memory().plain = this->common_tiles();
    rings().queries.wait_full(memory().pieces);
    char* const chunks = shared_.queries[memory().pieces % K.q_stages];
#pragma unroll 1
    for (int row = thread() / 32 * kAtOnce; row < kN; row += 4 * kScorers * kAtOnce) {
      this->prepare_queries(chunks, row);
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kMeet, kThreads);
  }
  /// What owners of outputs need to know of rows.
  __device__ __forceinline__ void end() {
    auto& end = shared_.roles.end;
    if (!piece().tiles.empty()) {
      // All blocks have their weights.
      ptx::barrier_sync(kMeet, kThreads);
      if (kScorers > 1) {
        if (agreed(!makes(piece().tiles.end - 1))) follow_other(item_);
      }
      __syncwarp();
      if (lane() == 0) rings().queries.release(memory().pieces++);
    }
    rings().ends.claim(memory().ends);
    const int lane = this->lane();
    float* const sums = end.sums[thread() / 32] + first_sum();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float all = sum_[i];
      if constexpr (!kGathers) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) all += __shfl_xor_sync(~0U, all, lanes);
      }
      if (kGathers || lane < 4) sums[row_of(i)] = all;
    }
    if (thread() < kN) end.shift[thread()] = shared_.shift.of[thread()];
    if (thread() == 0) end.lacks = shared_.roles.top / kLatentOffset;
    __syncwarp();
    if (lane == 0) rings().ends.arrive_full(memory().ends++);
    __syncwarp();
  }

  // ---- weights ----

  /// Those of a block.
  __device__ __forceinline__ void make(int tile) {
    // Of all lanes, as the compiler can see.
    const std::uint32_t keys = __shfl_sync(~0U, rings().keys.buffer(item_), 0);
    std::uint32_t queries = rings().queries.buffer(memory().pieces);
    if constexpr (K.q_stages > 1) queries = __shfl_sync(~0U, queries, 0);
    rings().keys.wait_full(item_);
    // What threads have copied, wgmma sees after this.
    if constexpr (latent_chunked(K)) ptx::fence_proxy_async();
    if (p.cache.pages.skips && is_skipped(shared_, item_)) return pass(tile);
    this->multiply_keys(keys, queries);
    if (kScorers == 1 && lane() == 0) rings().scored.arrive_full(item_);
    const core::Range plain = memory().plain;
    if (agreed(tile < plain.begin || tile >= plain.end)) {
      this->hide(piece().keys.from(tile), item_);
    }
    rings().weights.claim(item_);
    take_turn(tile);
    float value_scales[2];  // the greatest of the lane's keys, lane / 4 and 8 further on
#pragma unroll
    for (int half = 0; half < 2; ++half) value_scales[half] = greatest(scales_of(keys, half));
    const bool fresh =
        this->shift() | (fmaxf(value_scales[0], value_scales[1]) > shared_.roles.top);
    const bool raises = ptx::barrier_any(kOwn + scorer_, 128, fresh);
    if (agreed(raises)) raise(value_scales);
    tell(raises, false);
    const float lacks = kLatentOffset / shared_.roles.top;
    give_turn(tile);
    store(keys, value_scales, lacks);
    ptx::fence_proxy_async();
    hand_over();
  }
  /// A block whose keys nobody sees.
  __device__ __forceinline__ void pass(int tile) {
    if (kScorers == 1 && lane() == 0) rings().scored.arrive_full(item_);
    rings().weights.claim(item_);
    take_turn(tile);
    tell(true, true);
    give_turn(tile);
    hand_over();
  }
  __device__ __forceinline__ void tell(bool changes, bool skipped) const {
    if (thread() % 128 != 0) return;
    told(item_).changes = changes;
    told(item_).skipped = skipped;
  }
  /// To owners of outputs.
  __device__ __forceinline__ void hand_over() const {
    __syncwarp();
    if (lane() == 0) {
      rings().weights.arrive_full(item_);
      rings().keys.release(item_);
    }
  }
  /// From the warpgroup that makes the block before to the one that makes the next.
  /// @{
  __device__ __forceinline__ void take_turn(int tile) {
    if (kScorers > 1 && agreed(tile > piece().tiles.begin)) {
      ptx::barrier_sync(kTurn + scorer_, kThreads);
      follow_other(item_);
    }
  }
  __device__ __forceinline__ void give_turn(int tile) const {
    if (kScorers > 1 && agreed(tile + 1 < piece().tiles.end)) {
      ptx::barrier_arrive(kTurn + 1 - scorer_, kThreads);
    }
  }
  /// @}

  /// Where the other warpgroup has raised shifts for its block, the one before, sums follow.
  __device__ __forceinline__ void follow_other(std::uint32_t item) {
    const LatentTold<K>& told = this->told(item - 1);
    if (agreed(!told.changes || told.skipped)) return;
    const float* const factors = told.factor + first_sum();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum_[i] *= factors[row_of(i)];
  }
  /// The shifts of rows become their greatest scores, where these are greater; what goes by them
  /// follows.
  __device__ __forceinline__ void raise(const float (&value_scales)[2]) {
    float* const tops = reinterpret_cast<float*>(shared_.weights[item_ % latent_weight_stages(K)]);
    float* const tops_of_scales = tops + 4 * kN;
    this->leave_tops(tops);
    leave_top(value_scales, tops_of_scales);
    ptx::barrier_sync(kOwn + scorer_, 128);
    const int first_row = this->first_row();
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      this->follow(i, this->raised(tops, first_row + row_of(i)));
    }
    const int first_sum = this->first_sum();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sum_[i] *= this->raised(tops, first_sum + row_of(i)).factor();
    }
    const int row = thread() % 128;
    if (row == 0) shared_.shift.lacks = false;
    // Everybody has read the shifts; then that they have changed, and maxima.
    ptx::barrier_sync(kOwn + scorer_, 128);
    if (row < kN) {
      const auto shift = this->raised(tops, row);
      shared_.shift.set(row, shift.after);
      told(item_).factor[row] = shift.factor();
    }
    if (row == 0) {
      const float top = raised_top(tops_of_scales);
      told(item_).of_outputs = shared_.roles.top / top;
      shared_.roles.top = top;
    }
    ptx::barrier_sync(kOwn + scorer_, 128);
  }
  /// tops: of warps.
  __device__ __forceinline__ void leave_top(const float (&most)[2], float* tops) const {
    float top = fmaxf(most[0], most[1]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0U, top, lanes));
    }
    if (lane() == 0) tops[warp()] = top;
  }
  /// What the power of two becomes.
  __device__ __forceinline__ float raised_top(const float* tops) const {
    const float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    constexpr std::uint32_t kFraction = 0x7FFFFFU;
    return fmaxf(shared_.roles.top,
                 __uint_as_float((__float_as_uint(top) + kFraction) & ~kFraction));
  }

  /// Weights of a block, [key][row], swizzled, and their sums; but times scales: those of each
  /// group of columns or, where weights lie there once, the greatest of their key.
  __device__ __forceinline__ void store(std::uint32_t keys, const float (&most)[2], float lacks) {
    float scales[2][kWeights];
    if constexpr (kWeights == 1) {
      tell_shares(keys, most);
#pragma unroll
      for (int half = 0; half < 2; ++half) scales[half][0] = most[half] * lacks;
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = scales_of(keys, half);
        scales[half][0] = x.x * lacks;
        scales[half][1] = x.y * lacks;
        scales[half][2] = x.z * lacks;
        scales[half][3] = x.w * lacks;
      }
    }
    const int lane = this->lane();
    const std::uint32_t key = static_cast<std::uint32_t>(warp() * 16 + lane % 16);
    const std::uint32_t to = rings().weights.buffer(item_) + key * 128;
    float added[kRowsOfThread];  // to sums
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      float weights[4][2];  // of neighbouring rows: 8 rows of two keys, and the next 8
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) weights[n][j] = ptx::ex2(s_[8 * i + 2 * n + j]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        added[4 * i + n] = weights[n / 2 * 2][n % 2] + weights[n / 2 * 2 + 1][n % 2];
      }
#pragma unroll
      for (int w = 0; w < kWeights; ++w) {
        std::uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float scale = scales[n % 2][w];
          words[n] = ptx::pack<Dtype::f16>(weights[n][0] * scale, weights[n][1] * scale);
        }
        const std::uint32_t unit = w * kN / 8 % 8 + 2 * i + lane / 16;
        ptx::store_matrices(to + w * kN / 64 * kKeys * 128 + (unit ^ key % 8) * 16, words);
      }
    }
    if constexpr (kGathers) gather(added);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum_[i] += added[i];
  }
  /// Numbers of all rows of a thread become, in its first two, those of rows from first_sum() on,
  /// added up over the eight lanes that have the same rows.
  template <int kLanes = 16>
  __device__ __forceinline__ static void gather(float (&x)[kRowsOfThread]) {
    constexpr int kHalf = kRowsOfThread * kLanes / 32;
    const bool upper = (Scores::lane() & kLanes) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float kept = upper ? x[kHalf + i] : x[i], given = upper ? x[i] : x[kHalf + i];
      x[i] = kept + __shfl_xor_sync(~0U, given, kLanes);
    }
    if constexpr (kLanes > 4) gather<kLanes / 2>(x);
  }
  __device__ __forceinline__ static int first_sum() {
    const int lane = Scores::lane();
    return (kGathers ? lane / 4 * 8 : 0) + lane % 4 * 2;
  }
  /// Owners of outputs multiply the block's values by these.
  __device__ __forceinline__ void tell_shares(std::uint32_t keys, const float (&most)[2]) const {
    const int lane = this->lane(), group = lane % 4, key = lane / 4;  // of 8
    std::uint32_t(&to)[2] = told(item_).shares[group][key / 2][warp()];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float share = scale_at(keys, half)[group] * inverse(most[half]);
      reinterpret_cast<std::uint16_t*>(&to[half])[key % 2] =
          static_cast<std::uint16_t>(ptx::pack<Dtype::f16>(share, share));
    }
  }

  const std::uint32_t scorer_;
  std::uint32_t item_ = 0;
  float sum_[kSums];
};

}  // namespace tessera::cuda::sm90
