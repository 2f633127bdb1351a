// Decoding of latent attention (MLA with absorbed weights: DeepSeek-V2, section 2.1): values are
// keys, too, as scores are q . k + qv . v. So a key and its value, 1152 bytes, are read once for
// all query heads. Blocks of threads take equal spans of all keys, as any decoding
// (mma/decode_walk.h).
//
// Products are transposed: keys lie along wgmma's 64 rows, query rows along its columns, of which
// there may be 16. One warpgroup fetches (latent_loads.h). Two multiply: they take turns to make
// the weights of a block of keys,
//     S^T = [K V] [Q QV]^T,  P^T = exp2(S^T - shift), to shared memory,
// and each owns half of the columns of O^T += V^T P^T.
#pragma once

#include "cuda/sm90/latent_results.h"
#include "cuda/sm90/products.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

/// A consuming warpgroup.
template <core::Kernel K>
class LatentConsumer {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kN = K.block_m, kKeys = K.block_n;
  static constexpr int kMine = K.head_dim_v / 128;  ///< chunks of 64 columns of O
  static constexpr int kRowsOfThread = kN / 4;      ///< 2 neighbours of each 8
  using Wgmma = ptx::Wgmma<kType, kN>;
  static_assert(kKeys == 64);

 public:
  __device__ __forceinline__ LatentConsumer(const mma::DecodeParams& params,
                                            LatentShared<K>& shared, mma::DecodeWalk<K>& walk)
      : p(params),
        shared_(shared),
        rings_(shared),
        walk_(walk),
        piece_(shared.pieces[threadIdx.x / 32]),
        group_(threadIdx.x / 128),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(threadIdx.x % 32) {}

  /// more: whether there is a first piece.
  __device__ __forceinline__ void run(bool more) {
#pragma unroll 1
    while (more) {
      begin();
#pragma unroll 1
      for (int tile = piece_.tiles.begin; tile < piece_.tiles.end; ++tile) {
        rings_.keys.wait_full(item_);
        // What the producer's threads have copied, wgmma sees after this.
        ptx::fence_proxy_async();
        if (item_ % 2 == group_) {
          own(tile);
        } else {
          ptx::barrier_arrive(kWeightsFree, 256);
          ptx::barrier_sync(kWeightsReady, 256);
          if (agreed(shared_.raised != 0)) follow();
        }
        multiply_values();
        if (lane_ == 0) rings_.keys.release(item_);
        ++item_;
      }
      if (!piece_.tiles.empty()) {
        if (lane_ == 0) rings_.queries.release(pieces_);
        ++pieces_;
      }
      LatentResults<K>(p, walk_, piece_, shared_, o_).finish(sum_);
      more = walk_.advance(piece_);
    }
  }

 private:
  // Named barriers.
  static constexpr int kWeightsFree = 1;   ///< nobody reads the weights of the block before
  static constexpr int kWeightsReady = 2;  ///< those of this block are there
  static constexpr int kOwners = 3;        ///< and the next: of a warpgroup alone

  __device__ __forceinline__ core::SequenceMask mask() const {
    return p.mask.of(p.sequences, piece_.sequence);
  }
  /// The thread's i-th row.
  __device__ __forceinline__ int row_of(int i) const {
    return i / 2 * 8 + static_cast<int>(lane_ % 4) * 2 + i % 2;
  }
  __device__ __forceinline__ int query_of(int row) const {
    return mma::row_of<K>(piece_, p.group, core::min(row, core::max(piece_.rows - 1, 0))).query;
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int c = 0; c < kMine; ++c) {
#pragma unroll
      for (float& x : o_[c]) x = 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      // Both warpgroups write the same, before the first block's owner does more.
      shared_.shift[row_of(i)] = -core::kInfinity;
      sum_[i] = 0.0F;
    }
    if (piece_.tiles.empty()) return;
    plain_ = piece_.keys.inside(mask().common_keys({query_of(0), query_of(piece_.rows - 1) + 1}));
    rings_.queries.wait_full(pieces_);
    ptx::fence_proxy_async();
  }

  // ---- weights of a block ----

  /// This warpgroup's block: its weights go to shared memory.
  __device__ __forceinline__ void own(int tile) {
    multiply_along<Wgmma, kKeys, kN, latent_chunks(K) * 64>(
        s_, ptx::descriptor_along(rings_.keys.buffer(item_)),
        ptx::descriptor_along(rings_.queries.buffer(pieces_)));
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(s_);
    if (!(plain_.begin <= tile && tile < plain_.end)) hide(piece_.keys.from(tile));
    std::uint32_t words[kN / 4];
    bool raised = false;
    float part[kRowsOfThread];
    weigh<false>(words, part);
    if (ptx::barrier_any(kOwners + group_, 128, too_large(part))) {
      raised = true;
      ptx::barrier_sync(kWeightsFree, 256);
      raise();
      weigh<true>(words, part);
    } else {
      ptx::barrier_sync(kWeightsFree, 256);
    }
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) sum_[i] += part[i];
    if (threadIdx.x % 128 == 0) shared_.raised = raised ? 1 : 0;
    store(words);
    ptx::fence_proxy_async();
    ptx::barrier_sync(kWeightsReady, 256);
  }

  /// words: pairs of neighbouring rows' weights of a key; part: their sums over the thread's keys.
  /// Where no key has been seen a row's shift is -inf. Its weights are infinite or NaN then, or,
  /// once the shift has been raised, 0.
  template <bool kRaised>
  __device__ __forceinline__ void weigh(std::uint32_t (&words)[kN / 4],
                                        float (&part)[kRowsOfThread]) const {
#pragma unroll
    for (int c = 0; c < kN / 8; ++c) {
      const float2 shift = shift_of<kRaised>(c);
      const auto pair = [&](int i) {
        const float low = ptx::ex2(fmaf(s_[i], p.score.pre, -shift.x));
        const float high = ptx::ex2(fmaf(s_[i + 1], p.score.pre, -shift.y));
        words[i / 2] = ptx::pack<kType>(low, high);
        return float2{low, high};
      };
      const float2 first = pair(4 * c), second = pair(4 * c + 2);
      part[2 * c] = first.x + second.x;
      part[2 * c + 1] = first.y + second.y;
    }
  }
  /// Of the thread's rows among the c-th 8.
  template <bool kRaised>
  __device__ __forceinline__ float2 shift_of(int c) const {
    const float2 shift = *reinterpret_cast<const float2*>(shared_.shift + row_of(2 * c));
    if (!kRaised) return shift;
    return {core::shift_of(shift.x), core::shift_of(shift.y)};
  }
  __device__ __forceinline__ static bool too_large(const float (&part)[kRowsOfThread]) {
    bool fits = true;
#pragma unroll
    for (const float x : part) fits = fits && x < kMostPart;
    return !fits;
  }

  /// The shifts of rows become their greatest scores, where these are greater; what goes by them
  /// follows, here and in the other warpgroup.
  __device__ __forceinline__ void raise() {
    float* const tops = reinterpret_cast<float*>(shared_.weights);  // [4 warps][rows]
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int at = i / 2 * 4 + i % 2;
      float top = fmaxf(s_[at], s_[at + 2]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0U, top, lanes));
      }
      if (lane_ < 4) tops[warp_ * kN + row_of(i)] = top;
    }
    ptx::barrier_sync(kOwners + group_, 128);
    float factor[kRowsOfThread];
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const float* const top = tops + row_of(i);
      const float most = fmaxf(fmaxf(top[0], top[kN]), fmaxf(top[2 * kN], top[3 * kN]));
      const float before = shared_.shift[row_of(i)], after = fmaxf(before, most * p.score.pre);
      factor[i] = after == -core::kInfinity ? 1.0F : ptx::ex2(before - after);
    }
    // Everybody has read maxima and shifts.
    ptx::barrier_sync(kOwners + group_, 128);
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      if (warp_ > 0 || lane_ >= 4) break;
      const float* const top = tops + row_of(i);
      const float most = fmaxf(fmaxf(top[0], top[kN]), fmaxf(top[2 * kN], top[3 * kN]));
      float& shift = shared_.shift[row_of(i)];
      shift = fmaxf(shift, most * p.score.pre);
      shared_.factor[row_of(i)] = factor[i];
    }
    rescale(factor);
    ptx::barrier_sync(kOwners + group_, 128);
  }
  /// The other warpgroup has raised shifts.
  __device__ __forceinline__ void follow() {
    float factor[kRowsOfThread];
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      factor[i] = shared_.factor[row_of(i)];
    }
    rescale(factor);
  }
  __device__ __forceinline__ void rescale(const float (&factor)[kRowsOfThread]) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) sum_[i] *= factor[i];
#pragma unroll
    for (int c = 0; c < kMine; ++c) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) o_[c][i] *= factor[i / 4 * 2 + i % 2];
    }
  }

  /// Products of keys that a row does not see become -inf.
  __device__ __forceinline__ void hide(const core::Range& keys) {
    const core::SequenceMask mask = this->mask();
    const int first = keys.begin + warp_ * 16 + static_cast<int>(lane_ / 4);
    std::uint32_t hidden = 0;
#pragma unroll 1
    for (int i = 0; i < kRowsOfThread; ++i) {
      const core::QueryMask seen = mask.of(query_of(row_of(i)));
      for (int half = 0; half < 2; ++half) {
        const int key = first + 8 * half;
        if (key >= keys.end || !seen.visible(key)) hidden |= 1U << (i / 2 * 4 + i % 2 + 2 * half);
      }
    }
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if ((hidden >> i & 1) != 0) s_[i] = -core::kInfinity;
    }
  }

  /// [key][row], swizzled.
  __device__ __forceinline__ void store(const std::uint32_t (&words)[kN / 4]) const {
    const std::uint32_t key = static_cast<std::uint32_t>(warp_) * 16 + lane_ % 16;
    const std::uint32_t to = ptx::shared_address(shared_.weights) + key * 128;
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      const std::uint32_t unit = 2 * i + lane_ / 16;
      ptx::store_matrices(to + (unit ^ key % 8) * 16, words + 4 * i);
    }
  }

  // ---- values ----

  /// O^T += V^T P^T, this warpgroup's columns.
  __device__ __forceinline__ void multiply_values() {
    constexpr std::uint32_t kChunk = kKeys * 128 / 16, kStep = 16 * 128 / 16;
    const std::uint32_t values = ptx::descriptor_across(rings_.keys.buffer(item_), kKeys * 128) +
                                 (K.head_dim / 64 + group_ * kMine) * kChunk;
    const std::uint32_t weights =
        ptx::descriptor_across(ptx::shared_address(shared_.weights), kKeys * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int c = 0; c < kMine; ++c) {
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        Wgmma::shared_across(o_[c], ptx::descriptor(values + c * kChunk + i * kStep),
                             ptx::descriptor(weights + i * kStep), 1);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < kMine; ++c) ptx::wgmma_results(o_[c]);
  }

  const mma::DecodeParams& p;
  LatentShared<K>& shared_;
  const LatentRings<K> rings_;
  mma::DecodeWalk<K>& walk_;
  mma::DecodePiece& piece_;
  const std::uint32_t group_;
  const int warp_;
  const std::uint32_t lane_;
  core::Range plain_;  ///< tiles whose keys all rows see
  std::uint32_t item_ = 0, pieces_ = 0;
  float s_[kN / 2];
  float sum_[kRowsOfThread];  ///< of weights, the thread's
  float o_[kMine][kN / 2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void latent(const mma::DecodeParams& p, char* memory) {
  // Of what a block has been given, which is 168 each.
  constexpr int kConsumerRegisters = K.block_m > 32 ? 216 : 208;
  constexpr int kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
  static_assert(sizeof(LatentShared<K>) + 1024 <= latent_bytes(K));
  auto& shared = *reinterpret_cast<LatentShared<K>*>(
      memory + (1024 - ptx::shared_address(memory) % 1024) % 1024);
  if (threadIdx.x == 0) LatentRings<K>(shared).initialise();
  mma::DecodeWalk<K> walk(p, shared.search);
  mma::DecodePiece& piece = shared.pieces[threadIdx.x / 32];
  const bool more = walk.begin(piece);
  __syncthreads();
  if (threadIdx.x < 256) {
    ptx::raise_registers<kConsumerRegisters>();
    LatentConsumer<K>(p, shared, walk).run(more);
  } else {
    ptx::lower_registers<kProducerRegisters>();
    LatentLoads<K>(p, shared, walk).run(more);
  }
}

}  // namespace tessera::cuda::sm90
