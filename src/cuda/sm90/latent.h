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
//
// Values of 8 bits become fp16 in registers (S14), as the first operand of both products, and so
// lie in shared memory once, as they came (latent_widened.h).
#pragma once

#include "cuda/sm90/latent_results.h"
#include "cuda/sm90/latent_widened.h"
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
  static constexpr bool kWidens = core::widens(K);
  using Wgmma = ptx::Wgmma<kType, kN>;
  static_assert(kKeys == 64);

 public:
  __device__ __forceinline__ LatentConsumer(const mma::DecodeParams& params,
                                            LatentShared<K>& shared)
      : p(params),
        shared_(shared),
        walk_(params, shared.search, shared.span_length),
        piece_(shared.pieces[threadIdx.x / 32]),
        group_(__shfl_sync(~0U, threadIdx.x / 128, 0)),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    pieces() = 0;
#pragma unroll 1
    for (bool more = shared_.exists; agreed(more); more = walk_.advance(piece_)) {
      begin();
#pragma unroll 1
      for (int tile = piece_.tiles.begin; agreed(tile < piece_.tiles.end); ++tile) {
        rings().keys.wait_full(item_);
        // What the producer's threads have copied, wgmma sees after this.
        ptx::fence_proxy_async();
        const bool mine = agreed(item_ % 2 == group_);
        if (!mine) ptx::barrier_arrive(kWeightsFree, 256);
        if constexpr (kWidens) {
          // Of the first block; later of the next one, while the other warpgroup has this one.
          const int ahead = mine ? 0 : 1;
          if (agreed(tile + ahead < piece_.tiles.end && (!mine || tile == piece_.tiles.begin))) {
            multiply_keys(item_ + ahead);
          }
        }
        if (mine) {
          own(tile);
        } else {
          ptx::barrier_sync(kWeightsReady + (1 - group_), 256);
          if (agreed(shared_.raised != 0)) follow();
        }
        multiply_values();
        if (lane_ == 0) rings().keys.release(item_);
        ++item_;
      }
      if (!piece_.tiles.empty()) {
        __syncwarp();
        if (lane_ == 0) rings().queries.release(pieces()++);
        __syncwarp();
        if constexpr (kWidens) Widened(shared_).finish(o_);
      }
      LatentResults<K>(p, walk_, piece_, shared_, o_).finish(sum_);
    }
  }

 private:
  using Widened = LatentWidened<K>;

  // Named barriers.
  static constexpr int kWeightsFree = 1;   ///< nobody reads the weights of the block before
  static constexpr int kOwners = 3;        ///< and the next: of a warpgroup alone
  static constexpr int kWeightsReady = 7;  ///< and the next: those of a warpgroup's block are there

  /// Made anew each time: there are few registers.
  __device__ __forceinline__ LatentRings<K> rings() const { return LatentRings<K>(shared_); }
  __device__ __forceinline__ core::SequenceMask mask() const {
    return p.mask.of(p.sequences, piece_.sequence);
  }
  __device__ __forceinline__ core::Range& plain() const {
    return shared_.warps[threadIdx.x / 32].plain;
  }
  __device__ __forceinline__ std::uint32_t& pieces() const {
    return shared_.warps[threadIdx.x / 32].pieces;
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
    plain() = piece_.keys.inside(mask().common_keys({query_of(0), query_of(piece_.rows - 1) + 1}));
    rings().queries.wait_full(pieces());
    if constexpr (kWidens) Widened(shared_).begin(p.dtype, rings().queries.buffer(pieces()));
    ptx::fence_proxy_async();
    if constexpr (kWidens) ptx::barrier_sync(Widened::kQueriesReady, 256);
  }

  // ---- weights of a block ----

  /// S^T of an item of the ring.
  __device__ __forceinline__ void multiply_keys(std::uint32_t item) {
    const std::uint32_t keys = rings().keys.buffer(item);
    const std::uint32_t queries = rings().queries.buffer(pieces());
    if constexpr (kWidens) {
      rings().keys.wait_full(item);
      ptx::fence_proxy_async();
      Widened(shared_).multiply_keys(s_, keys, queries);
    } else {
      multiply_along<Wgmma, kKeys, kN, latent_chunks(K) * 64>(s_, ptx::descriptor_along(keys),
                                                              ptx::descriptor_along(queries));
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(s_);
    }
  }
  /// This warpgroup's block: its weights go to shared memory.
  __device__ __forceinline__ void own(int tile) {
    if constexpr (!kWidens) multiply_keys(item_);
    if (agreed(tile < plain().begin || tile >= plain().end)) hide(piece_.keys.from(tile));
    float value_scales[2] = {1.0F, 1.0F};  // of the lane's keys
    bool fresh = shift();
    if constexpr (kWidens) {
      fresh |= Widened(shared_).scales_of_values(rings().keys.buffer(item_), value_scales);
    }
    const bool raises = ptx::barrier_any(kOwners + group_, 128, fresh);
    ptx::barrier_sync(kWeightsFree, 256);
    if (agreed(raises)) raise(value_scales);
    if (threadIdx.x % 128 == 0) shared_.raised = raises ? 1 : 0;
    if constexpr (kWidens) {
      Widened(shared_).store(s_, sum_, rings().keys.buffer(item_), value_scales);
    } else {
      store();
    }
    ptx::fence_proxy_async();
    // The other warpgroup may be busy with its own block.
    ptx::barrier_arrive(kWeightsReady + group_, 256);
    ptx::barrier_sync(kOwners + group_, 128);
  }

  /// Products become what weights are powers of two of. Whether a shift must be raised: a weight
  /// would be large, or a row has seen no key before. NaN raises none.
  __device__ __forceinline__ bool shift() {
    bool fresh = false;
    float top = -core::kInfinity;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const float shift = shared_.shift[row_of(i)];
      fresh = fresh || shift == -core::kInfinity;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = score(i, half);
        x = fmaf(x, p.score.pre, -core::shift_of(shift));
        top = fmaxf(top, x);
      }
    }
    return fresh || top > kSlack;
  }
  /// Of the thread's i-th row and its half-th key.
  __device__ __forceinline__ float& score(int i, int half) {
    return s_[i / 2 * 4 + i % 2 + 2 * half];
  }

  /// A row's shift that is raised, if it is.
  struct Raised {
    float before, after;

    /// What weights, and sums of them, become.
    __device__ __forceinline__ float factor() const {
      return after == -core::kInfinity ? 1.0F : ptx::ex2(before - after);
    }
  };
  /// By the greatest scores that warps have found, [4 warps][rows].
  __device__ __forceinline__ Raised raised(const float* tops, int row) const {
    const float most =
        fmaxf(fmaxf(tops[row], tops[kN + row]), fmaxf(tops[2 * kN + row], tops[3 * kN + row]));
    const float before = shared_.shift[row];
    return {before, fmaxf(before, most + core::shift_of(before))};
  }
  /// The shifts of rows become their greatest scores, where these are greater; what goes by them
  /// follows, here and in the other warpgroup.
  __device__ __forceinline__ void raise(const float (&value_scales)[2]) {
    float* const tops = reinterpret_cast<float*>(shared_.weights);
    if constexpr (kWidens) Widened(shared_).leave_top(value_scales, tops + 4 * kN);
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      float top = fmaxf(score(i, 0), score(i, 1));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0U, top, lanes));
      }
      if (lane_ < 4) tops[warp_ * kN + row_of(i)] = top;
    }
    ptx::barrier_sync(kOwners + group_, 128);
    float top = 1.0F, of_outputs = 1.0F;
    if constexpr (kWidens) {
      top = Widened(shared_).raised(tops + 4 * kN);
      of_outputs = shared_.scales.top / top;
    }
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const Raised shift = raised(tops, row_of(i));
      const float change = core::shift_of(shift.after) - core::shift_of(shift.before);
      score(i, 0) -= change;
      score(i, 1) -= change;
      rescale(i, shift.factor(), of_outputs);
    }
    // Everybody has read the shifts; then that they have changed, and maxima.
    ptx::barrier_sync(kOwners + group_, 128);
    const int row = static_cast<int>(threadIdx.x) % 128;
    if (row < kN) {
      const Raised shift = raised(tops, row);
      shared_.shift[row] = shift.after;
      shared_.factor[row] = shift.factor();
    }
    if constexpr (kWidens) {
      if (row == 0) {
        shared_.scales.top = top;
        shared_.scales.change = of_outputs;
      }
    }
    ptx::barrier_sync(kOwners + group_, 128);
  }
  /// The other warpgroup has raised shifts.
  __device__ __forceinline__ void follow() {
    float of_outputs = 1.0F;
    if constexpr (kWidens) of_outputs = shared_.scales.change;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) rescale(i, shared_.factor[row_of(i)], of_outputs);
  }
  /// The thread's i-th row of sums and, by of_outputs more, of O^T.
  __device__ __forceinline__ void rescale(int i, float factor, float of_outputs) {
    sum_[i] *= factor;
    factor *= of_outputs;
#pragma unroll
    for (int c = 0; c < kMine; ++c) {
      o_[c][i / 2 * 4 + i % 2] *= factor;
      o_[c][i / 2 * 4 + i % 2 + 2] *= factor;
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

  /// Weights, and their sums: [key][row], swizzled.
  __device__ __forceinline__ void store() {
    const std::uint32_t key = static_cast<std::uint32_t>(warp_) * 16 + lane_ % 16;
    const std::uint32_t to = ptx::shared_address(shared_.weights) + key * 128;
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      std::uint32_t words[4];  // pairs of neighbouring rows: 8 rows of two keys, and the next 8
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float low = ptx::ex2(s_[8 * i + 2 * n]), high = ptx::ex2(s_[8 * i + 2 * n + 1]);
        sum_[4 * i + n / 2 * 2] += low;
        sum_[4 * i + n / 2 * 2 + 1] += high;
        words[n] = ptx::pack<kType>(low, high);
      }
      const std::uint32_t unit = 2 * i + lane_ / 16;
      ptx::store_matrices(to + (unit ^ key % 8) * 16, words);
    }
  }

  // ---- values ----

  /// O^T += V^T P^T, this warpgroup's columns.
  __device__ __forceinline__ void multiply_values() {
    if constexpr (kWidens) {
      Widened(shared_).multiply_values(o_, rings().keys.buffer(item_));
      return;
    }
    constexpr std::uint32_t kChunk = kKeys * 128 / 16, kStep = 16 * 128 / 16;
    const std::uint32_t values = ptx::descriptor_across(rings().keys.buffer(item_), kKeys * 128) +
                                 (K.head_dim / 64 + group_ * kMine) * kChunk;
    const std::uint32_t weights =
        ptx::descriptor_across(ptx::shared_address(shared_.weights), kKeys * 128);
    // O is where it will be before the fence; moved after it, it would need another.
#pragma unroll
    for (int c = 0; c < kMine; ++c) ptx::wgmma_results(o_[c]);
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
  mma::DecodeWalk<K> walk_;
  mma::DecodePiece<K>& piece_;
  const std::uint32_t group_;
  const int warp_;
  const std::uint32_t lane_;
  std::uint32_t item_ = 0;
  float s_[kN / 2];
  float sum_[kRowsOfThread];  ///< of weights, the thread's
  float o_[kMine][kN / 2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void latent(const mma::DecodeParams& p, char* memory) {
  // Of what a block has been given, which is 168 each.
  constexpr int kConsumerRegisters = K.block_m <= 32 ? 208 : core::widens(K) ? 232 : 224;
  constexpr int kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
  static_assert(sizeof(LatentShared<K>) + 1024 <= latent_bytes(K));
  auto& shared = *reinterpret_cast<LatentShared<K>*>(
      memory + (1024 - ptx::shared_address(memory) % 1024) % 1024);
  if (threadIdx.x == 0) LatentRings<K>(shared).initialise();
  // Roles go on from shared memory: what both had in registers would lack in one of them.
  {
    mma::DecodeWalk<K> walk(p, shared.search);
    const bool exists = walk.begin(shared.pieces[threadIdx.x / 32]);
    if (threadIdx.x == 0) {
      shared.exists = exists;
      shared.span_length = walk.spans().length;
    }
  }
  __syncthreads();
  if (threadIdx.x < 256) {
    ptx::raise_registers<kConsumerRegisters>();
    LatentConsumer<K>(p, shared).run();
  } else {
    ptx::lower_registers<kProducerRegisters>();
    LatentLoads<K>(p, shared).run();
  }
}

}  // namespace tessera::cuda::sm90
