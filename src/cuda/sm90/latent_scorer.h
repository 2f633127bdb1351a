// Who makes the weights of the latent kernel (latent.h) where values are of 8 bits beside keys of
// 16 (S14), as in FlashMLA's rows of 656 bytes: 512 values of e4m3, a scale for each 128 of them,
// 64 columns of keys. One warpgroup, or two that take blocks of keys in turn: each makes a block's
// scores by itself, and what rows' weights are powers of two of goes from one to the other.
//
// Values become fp16, which holds them exactly, on their way from shared memory to registers, from
// where wgmma takes its first operand. So do queries that meet them, times a power of two of their
// row. A key's scales by groups of columns are multiplied with the sums of each group and with
// weights, which each group has of its own (16 rows). Where there are too many rows for that,
// elements are multiplied by the scale of their group over the greatest of their key, and what is
// made of the key, scores or weights, by that one. Weights of fp16 lack a power of two, which is at
// least the greatest scale so far.
#pragma once

#include "cuda/mma/decode_widened.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/latent_scores.h"

namespace tessera::cuda::sm90 {

/// Weights of fp16 begin there, and end long before fp16 does.
inline constexpr float kLatentOffset = 0x1p7F;

template <core::Kernel K>
class LatentScorer : LatentScores<K> {
  using Scores = LatentScores<K>;
  using Scores::kKeys, Scores::kN, Scores::kRowsOfThread;
  using Scores::p, Scores::shared_, Scores::piece_, Scores::warp, Scores::lane;
  using Scores::s_, Scores::row_of, Scores::first_row;
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kScorers = core::decode_scorers(K), kThreads = kScorers * 128;
  static constexpr int kGroups = latent_groups(K);
  static constexpr std::uint32_t kQueryChunk = kN * 128;  ///< bytes of a chunk of queries
  using Wgmma = ptx::Wgmma<Dtype::f16, kN>;
  static constexpr int kUnits = 8;  ///< of 16 columns of 8 bits, in a chunk
  /// So many times 16 columns of keys become operands while those before are multiplied.
  static constexpr int kAtOnce = kN == 32 ? 8 : 2;
  static constexpr int kWeights = latent_weights(K);
  /// Whether groups of columns have sums of their own, which scales are multiplied with: where
  /// registers suffice. Else elements are.
  static constexpr bool kApart = kN == 16;
  /// Sums of weights that a thread has: of all its rows, or where they are many of two of them,
  /// over all keys of the warp.
  static constexpr bool kGathers = kN == 64;
  static constexpr int kSums = kGathers ? 2 : kRowsOfThread;
  static_assert(core::kScaledColumns == kUnits * 16);

 public:
  __device__ __forceinline__ LatentScorer(const mma::DecodeParams& params, LatentShared<K>& shared)
      : Scores(params, shared), scorer_(__shfl_sync(~0U, threadIdx.x / 128 - 2, 0)) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (bool more = shared_.exists; agreed(more); more = walk().advance(piece_)) {
      begin();
#pragma unroll 1
      for (int tile = piece_.tiles.begin; agreed(tile < piece_.tiles.end); ++tile) {
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
    return static_cast<std::uint32_t>(tile - piece_.tiles.begin) % kScorers == scorer_;
  }
  /// Of all who make weights.
  __device__ __forceinline__ static int thread() { return Scores::thread() - 256; }

  // ---- pieces ----

  /// Queries that meet values become fp16: each warp makes some rows.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (float& sum : sum_) sum = 0.0F;
    if (thread() < kN) shared_.shift[thread()] = -core::kInfinity;
    constexpr std::uint32_t kLeast = 27U << 23;  // 2^-100
    if (thread() == 0) shared_.roles.top = __uint_as_float(kLeast);
    if (piece_.tiles.empty()) return;
    plain_ = this->common_tiles();
    rings().queries.wait_full(pieces_);
    char* const chunks = shared_.queries[pieces_ % K.q_stages] + kQueryChunk;
#pragma unroll 1
    for (int row = thread() / 32; row < kN; row += 4 * kScorers) {
      const float factor = mma::widen_queries<K.head_dim_v>(p.dtype, [&](int word) {
        // Else places of all words are known before the first piece, and take registers.
        const std::uint32_t at = ptx::opaque(static_cast<std::uint32_t>(word));
        char* const line = chunks + at / 32 * kQueryChunk + row * 128;
        return reinterpret_cast<std::uint32_t*>(line + (at / 4 % 8 ^ row % 8) * 16) + at % 4;
      });
      if (lane() == 0) shared_.roles.query_factors[row] = factor;
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kMeet, kThreads);
  }
  /// What owners of outputs need to know of rows.
  __device__ __forceinline__ void end() {
    auto& end = shared_.roles.end;
    if (!piece_.tiles.empty()) {
      // All blocks have their weights.
      ptx::barrier_sync(kMeet, kThreads);
      if (kScorers > 1) {
        if (agreed(!makes(piece_.tiles.end - 1))) follow_other(item_);
      }
      __syncwarp();
      if (lane() == 0) rings().queries.release(pieces_++);
      pieces_ = __shfl_sync(~0U, pieces_, 0);
    }
    rings().ends.claim(ends_);
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
    if (thread() < kN) end.shift[thread()] = shared_.shift[thread()];
    if (thread() == 0) end.lacks = shared_.roles.top / kLatentOffset;
    __syncwarp();
    if (lane == 0) rings().ends.arrive_full(ends_);
    ++ends_;
  }

  // ---- weights ----

  /// Those of a block.
  __device__ __forceinline__ void make(int tile) {
    const std::uint32_t keys = rings().keys.buffer(item_);
    rings().keys.wait_full(item_);
    multiply_keys(keys, rings().queries.buffer(pieces_));
    if (agreed(tile < plain_.begin || tile >= plain_.end)) this->hide(piece_.keys.from(tile));
    rings().weights.claim(item_);
    const bool first = agreed(tile == piece_.tiles.begin);
    if (kScorers > 1 && !first) {
      ptx::barrier_sync(kTurn + scorer_, kThreads);
      follow_other(item_);
    }
    float value_scales[2];  // the greatest of the lane's keys, lane / 4 and 8 further on
#pragma unroll
    for (int half = 0; half < 2; ++half) value_scales[half] = greatest(scales_of(keys, half));
    const bool fresh =
        this->shift() | (fmaxf(value_scales[0], value_scales[1]) > shared_.roles.top);
    const bool raises = ptx::barrier_any(kOwn + scorer_, 128, fresh);
    if (agreed(raises)) raise(value_scales);
    if (thread() % 128 == 0) told(item_).raised = raises ? 1 : 0;
    const float lacks = kLatentOffset / shared_.roles.top;
    if (kScorers > 1 && agreed(tile + 1 < piece_.tiles.end)) {
      ptx::barrier_arrive(kTurn + 1 - scorer_, kThreads);
    }
    store(keys, value_scales, lacks);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() == 0) {
      rings().weights.arrive_full(item_);
      rings().keys.release(item_);
    }
  }

  /// Where the other warpgroup has raised shifts for its block, the one before, sums follow.
  __device__ __forceinline__ void follow_other(std::uint32_t item) {
    const LatentTold<K>& told = this->told(item - 1);
    if (agreed(told.raised == 0)) return;
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
    // Everybody has read the shifts; then that they have changed, and maxima.
    ptx::barrier_sync(kOwn + scorer_, 128);
    const int row = thread() % 128;
    if (row < kN) {
      const auto shift = this->raised(tops, row);
      shared_.shift[row] = shift.after;
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

  // ---- scores ----

  /// S^T of a block.
  __device__ __forceinline__ void multiply_keys(std::uint32_t keys, std::uint32_t queries) {
    float most[2] = {1.0F, 1.0F};
    std::uint32_t shares[kGroups][2];
    if constexpr (kApart) {
      multiply_rotated(keys, queries, 0);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 scales = scales_of(keys, half);
        most[half] = greatest(scales);
        const float over = inverse(most[half]);
        const float of[kGroups] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          shares[g][half] = ptx::pack<Dtype::f16>(of[g] * over, of[g] * over);
        }
      }
    }
    // Of all lanes, as the compiler can see.
    const std::uint32_t to = __shfl_sync(~0U, ptx::descriptor_along(queries + kQueryChunk), 0);
    constexpr int kBatches = kGroups * kUnits / kAtOnce, kOfGroup = kUnits / kAtOnce;
    std::uint32_t words[2][kAtOnce / 2][4], a[2][4 * kAtOnce];
    // Of a group and of the one before, and of all groups; not used where they are not apart.
    float sums[2][kN / 2], all[kN / 2];
    load_values(words[0], keys, 0);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      std::uint32_t* const now = a[batch % 2];
      const int group = batch / kOfGroup;
      if (batch >= 2) ptx::wgmma_wait<1>();
      // Of batches before the last one all is done.
      if (kApart && batch >= 2 && (batch - 2) % kOfGroup == kOfGroup - 1) {
        add_group((batch - 2) / kOfGroup, all, sums[(batch - 2) / kOfGroup % 2], keys);
      }
      if (batch + 1 < kBatches) load_values(words[(batch + 1) % 2], keys, (batch + 1) * kAtOnce);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::uint32_t* const from = words[batch % 2][i / 2] + i % 2 * 2;
        std::uint32_t* const x = now + 4 * i;
        ptx::widen_four<K.cached>(from[0], x[0], x[2]);
        ptx::widen_four<K.cached>(from[1], x[1], x[3]);
        if constexpr (!kApart) {
#pragma unroll
          for (int n = 0; n < 4; ++n) x[n] = ptx::multiply_pairs(x[n], shares[group][n % 2]);
        }
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int step = batch * kAtOnce + i;
        Wgmma::registers(kApart ? sums[group % 2] : s_, now + 4 * i,
                         ptx::descriptor(to + (step / 4 * kQueryChunk + step % 4 * 32) / 16),
                         (kApart ? step % kUnits : step) != 0);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
    if constexpr (kApart) {
      if constexpr (kOfGroup == 1) add_group(kGroups - 2, all, sums[(kGroups - 2) % 2], keys);
      add_group(kGroups - 1, all, sums[(kGroups - 1) % 2], keys);
      ptx::wgmma_results(s_);
      const float* const factors = query_factors(0);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s_[i] = fmaf(all[i], factors[i / 4 * 8 + i % 2], s_[i]);
    } else {
      ptx::wgmma_results(s_);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s_[i] *= most[i / 2 % 2] * query_factors(i / 4)[i % 2];
      multiply_rotated(keys, queries, 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(s_);
    }
  }
  /// Values of the warp's 16 keys, of units of 16 columns from one on.
  __device__ __forceinline__ void load_values(std::uint32_t (&words)[kAtOnce / 2][4],
                                              std::uint32_t keys, int unit) const {
#pragma unroll
    for (int i = 0; i < kAtOnce / 2; ++i) {
      ptx::load_matrices(words[i], own_rows(keys) + (unit + 2 * i) * 16);
    }
  }
  /// The first 16 bytes of a row, or those beside them, as ldmatrix takes them.
  __device__ __forceinline__ static std::uint32_t own_rows(std::uint32_t keys) {
    const int lane = Scores::lane();
    return keys + (Scores::warp() * 16 + lane % 16) * latent_row_bytes(K) + lane / 16 * 16;
  }
  /// Begins S^T = or += K Q^T, of columns of 16 bits.
  __device__ __forceinline__ void multiply_rotated(std::uint32_t keys, std::uint32_t queries,
                                                   int add) {
    const std::uint32_t b = __shfl_sync(~0U, ptx::descriptor_along(queries), 0);
    constexpr int kSteps = K.head_dim / 16;
    std::uint32_t a[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::load_matrices(a[i], own_rows(keys) + latent_key_at(K) + i * 32);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::Wgmma<kType, kN>::registers(s_, a[i], ptx::descriptor(b + i * 2), i == 0 ? add : 1);
    }
    ptx::wgmma_commit();
  }
  /// Sums of a group of columns, times its scales, to those of all.
  __device__ __forceinline__ void add_group(int group, float (&all)[kN / 2], float (&sums)[kN / 2],
                                            std::uint32_t keys) const {
    ptx::wgmma_results(sums);
    const float scales[2] = {scale_at(keys, 0)[group], scale_at(keys, 1)[group]};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float scale = scales[i / 2 % 2];
      all[i] = group == 0 ? sums[i] * scale : fmaf(sums[i], scale, all[i]);
    }
  }
  /// Of the thread's two rows of eight.
  __device__ __forceinline__ const float* query_factors(int eight) const {
    return shared_.roles.query_factors + 8 * eight + lane() % 4 * 2;
  }

  // ---- scales ----

  /// Of a block's keys, the lane's half-th.
  __device__ __forceinline__ const float* scale_at(std::uint32_t keys, int half) const {
    const char* const rows = shared_.ring[0] + (keys - ptx::shared_address(shared_.ring));
    const int row = warp() * 16 + lane() / 4 + 8 * half;
    return reinterpret_cast<const float*>(rows + row * latent_row_bytes(K) + latent_scales_at(K));
  }
  __device__ __forceinline__ float4 scales_of(std::uint32_t keys, int half) const {
    static_assert(kGroups == 4);
    return *reinterpret_cast<const float4*>(scale_at(keys, half));
  }
  __device__ __forceinline__ static float greatest(const float4& x) {
    return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  }
  /// Of scales that are all 0 or NaN, which stay that: 1.
  __device__ __forceinline__ static float inverse(float most) {
    return most > 0.0F ? 1.0F / most : 1.0F;
  }

  const std::uint32_t scorer_;
  core::Range plain_;  ///< tiles of the piece whose keys all rows see
  std::uint32_t item_ = 0, pieces_ = 0, ends_ = 0;
  float sum_[kSums];
};

}  // namespace tessera::cuda::sm90
