// Decoding of latent attention (MLA with absorbed weights: DeepSeek-V2, section 2.1): values are
// keys, too, as scores are q . k + qv . v. So a key and its value, 1152 bytes, are read once for
// all query heads. Blocks of threads take equal spans of all keys, as any decoding
// (mma/decode_walk.h).
//
// Products are transposed: keys lie along wgmma's 64 rows, query rows along its columns, of which
// there may be 16:
//     S^T = [K V] [Q QV]^T,  P^T = exp2(S^T - shift), to shared memory,  O^T += V^T P^T.
// One warpgroup fetches (latent_loads.h). Two multiply: they take turns to make the weights of a
// block of keys, and each owns half of the columns of O^T.
//
// Values of 8 bits become fp16 in registers, which takes as long as the products; so weights have
// makers of their own (latent_scorer.h), and outputs have owners (latent_owner.h).
#pragma once

#include "cuda/sm90/latent_owner.h"
#include "cuda/sm90/latent_results.h"
#include "cuda/sm90/latent_scorer.h"
#include "cuda/sm90/products.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

/// A consuming warpgroup, of values of 16 bits.
template <core::Kernel K>
class LatentConsumer : LatentScores<K> {
  using Scores = LatentScores<K>;
  using Scores::kKeys, Scores::kN, Scores::kRowsOfThread;
  using Scores::p, Scores::shared_, Scores::piece, Scores::warp, Scores::lane;
  using Scores::s_, Scores::row_of, Scores::first_row;
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kMine = K.head_dim_v / 128;  ///< chunks of 64 columns of O
  using Wgmma = ptx::Wgmma<kType, kN>;

 public:
  __device__ __forceinline__ LatentConsumer(const mma::DecodeParams& params,
                                            LatentShared<K>& shared)
      : Scores(params, shared),
        walk_(params, shared.search, shared.span_length),
        group_(__shfl_sync(~0U, threadIdx.x / 128, 0)) {}

  __device__ __forceinline__ void run() {
    pieces() = 0;
#pragma unroll 1
    for (bool more = shared_.exists; agreed(more); more = walk_.advance(piece())) {
      begin();
#pragma unroll 1
      for (int tile = piece().tiles.begin; agreed(tile < piece().tiles.end); ++tile) {
        rings().keys.wait_full(item_);
        if (p.cache.pages.skips && is_skipped(shared_, item_)) {
          release();
          continue;
        }
        // What the producer's threads have copied, wgmma sees after this.
        ptx::fence_proxy_async();
        multiply(tile);
        release();
      }
      if (!piece().tiles.empty()) {
        __syncwarp();
        if (lane() == 0) rings().queries.release(pieces()++);
        __syncwarp();
      }
      LatentResults<K> results(p, walk_, piece(), shared_, o_);
      results.end_rows(sum_);
      results.finish();
    }
  }

 private:
  // Named barriers.
  static constexpr int kWeightsFree = 1;   ///< nobody reads the weights of the block before
  static constexpr int kWeightsReady = 2;  ///< those of this block are there
  static constexpr int kOwners = 3;        ///< and the next: of a warpgroup alone

  /// Made anew each time: there are few registers.
  __device__ __forceinline__ LatentRings<K> rings() const { return LatentRings<K>(shared_); }
  __device__ __forceinline__ LatentTold<K>& told() const { return shared_.told[0]; }
  __device__ __forceinline__ core::Range& plain() const {
    return shared_.warps[threadIdx.x / 32].plain;
  }
  __device__ __forceinline__ std::uint32_t& pieces() const {
    return shared_.warps[threadIdx.x / 32].pieces;
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
      shared_.shift.set(first_row() + row_of(i), -core::kInfinity);
      sum_[i] = 0.0F;
    }
    if (piece().tiles.empty()) return;
    plain() = this->common_tiles();
    rings().queries.wait_full(pieces());
    ptx::fence_proxy_async();
  }

  /// Where they lie, of all lanes, as the compiler can see.
  /// @{
  __device__ __forceinline__ std::uint32_t keys_of_block() const {
    return __shfl_sync(~0U, rings().keys.buffer(item_), 0);
  }
  __device__ __forceinline__ std::uint32_t queries_of_piece() const {
    if constexpr (K.q_stages == 1) return rings().queries.buffer(0);
    return __shfl_sync(~0U, rings().queries.buffer(pieces()), 0);
  }
  /// @}
  /// The block is not needed any more.
  __device__ __forceinline__ void release() {
    if (lane() == 0) rings().keys.release(item_);
    ++item_;
  }
  /// A block, of which the two make weights in turn.
  __device__ __forceinline__ void multiply(int tile) {
    // Counted in the piece: so sums do not depend on what lies before it (S9).
    if (agreed(static_cast<std::uint32_t>(tile - piece().tiles.begin) % 2 == group_)) {
      own(tile);
    } else {
      ptx::barrier_arrive(kWeightsFree, 256);
      ptx::barrier_sync(kWeightsReady, 256);
      if (agreed(told().raised != 0)) {
        const float* const factors = told().factor + first_row();
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) rescale(i, factors[row_of(i)]);
      }
    }
    multiply_values();
  }

  // ---- weights of a block ----

  /// This warpgroup's block: its weights go to shared memory.
  __device__ __forceinline__ void own(int tile) {
    multiply_along<Wgmma, kKeys, kN, latent_chunks(K) * 64>(
        s_, ptx::descriptor_along(keys_of_block()), ptx::descriptor_along(queries_of_piece()));
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(s_);
    if (agreed(tile < plain().begin || tile >= plain().end)) {
      this->hide(piece().keys.from(tile), item_);
    }
    const bool raises = ptx::barrier_any(kOwners + group_, 128, this->shift());
    ptx::barrier_sync(kWeightsFree, 256);
    if (agreed(raises)) raise();
    if (threadIdx.x % 128 == 0) told().raised = raises ? 1 : 0;
    store();
    ptx::fence_proxy_async();
    ptx::barrier_sync(kWeightsReady, 256);
  }

  /// The shifts of rows become their greatest scores, where these are greater; what goes by them
  /// follows, here and in the other warpgroup.
  __device__ __forceinline__ void raise() {
    float* const tops = reinterpret_cast<float*>(shared_.weights);
    this->leave_tops(tops);
    ptx::barrier_sync(kOwners + group_, 128);
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const auto shift = this->raised(tops, first_row() + row_of(i));
      this->follow(i, shift);
      rescale(i, shift.factor());
    }
    // Everybody has read the shifts; then that they have changed, and maxima.
    ptx::barrier_sync(kOwners + group_, 128);
    const int row = static_cast<int>(threadIdx.x) % 128;
    if (row < kN) {
      const auto shift = this->raised(tops, row);
      shared_.shift.set(row, shift.after);
      told().factor[row] = shift.factor();
    }
    ptx::barrier_sync(kOwners + group_, 128);
  }
  /// The thread's i-th row of sums and of O^T.
  __device__ __forceinline__ void rescale(int i, float factor) {
    sum_[i] *= factor;
#pragma unroll
    for (int c = 0; c < kMine; ++c) {
      o_[c][i / 2 * 4 + i % 2] *= factor;
      o_[c][i / 2 * 4 + i % 2 + 2] *= factor;
    }
  }

  /// Weights, and their sums: [key][row], swizzled.
  __device__ __forceinline__ void store() {
    const std::uint32_t key = static_cast<std::uint32_t>(warp() * 16 + lane() % 16);
    const std::uint32_t to = ptx::shared_address(shared_.weights) + key * 128;
    // Else places are known before the first block, and take registers.
    const std::uint32_t line = ptx::opaque(key % 8);
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
      const std::uint32_t unit = 2 * i + lane() / 16;
      ptx::store_matrices(to + (unit ^ line) * 16, words);
    }
  }

  // ---- values ----

  /// O^T += V^T P^T, this warpgroup's columns.
  __device__ __forceinline__ void multiply_values() {
    constexpr std::uint32_t kChunk = kKeys * 128 / 16, kStep = 16 * 128 / 16;
    const std::uint32_t values = ptx::descriptor_across(keys_of_block(), kKeys * 128) +
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

  mma::DecodeWalk<K> walk_;
  const std::uint32_t group_;
  std::uint32_t item_ = 0;
  float sum_[kRowsOfThread];  ///< of weights, the thread's
  float o_[kMine][kN / 2];
};

/// Registers of a thread: of those who own outputs, those who make weights besides, and those who
/// copy; together as many as a block has been given.
struct LatentRegisters {
  int owners, scorers, copies;
};
TESSERA_HD constexpr LatentRegisters latent_registers(const core::Kernel& row) {
  if (!core::widens(row)) {
    return row.block_m <= 32 ? LatentRegisters{208, 0, 88} : LatentRegisters{224, 0, 56};
  }
  return row.block_m <= 16   ? LatentRegisters{96, 120, 48}
         : row.block_m <= 32 ? LatentRegisters{136, 160, 80}
                             : LatentRegisters{176, 112, 48};
}
/// What every thread begins with: registers come in eights, and a multiprocessor has 64 Ki.
TESSERA_HD constexpr int latent_first_registers(const core::Kernel& row) {
  return 65536 / core::decode_threads(row) / 8 * 8;
}
template <int kBefore, int kAfter>
__device__ __forceinline__ void take_registers() {
  if constexpr (kAfter > kBefore) ptx::raise_registers<kAfter>();
  if constexpr (kAfter < kBefore) ptx::lower_registers<kAfter>();
}

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void latent(const mma::DecodeParams& p, char* memory) {
  constexpr int kScorers = core::decode_scorers(K);
  constexpr LatentRegisters kRegisters = latent_registers(K);
  static_assert(sizeof(LatentShared<K>) + 1024 <= latent_bytes(K));
  auto& shared = *reinterpret_cast<LatentShared<K>*>(
      memory + (1024 - ptx::shared_address(memory) % 1024) % 1024);
  if (threadIdx.x == 0) LatentRings<K>(shared).initialise(p.cache.pages.skips);
  // Roles go on from shared memory: what both had in registers would lack in one of them.
  {
    mma::DecodeWalk<K> walk(p, shared.search);
    mma::DecodePiece<K>& piece = shared.pieces[ptx::opaque(threadIdx.x) / 32];
    bool exists;
    if constexpr (K.block_m == 16) {
      exists = walk.next(piece, piece, [&](const mma::DecodePiece<K>& of) {
        if (threadIdx.x >= 256 + 128 * kScorers) LatentLoads<K>(p, shared).prefetch(of);
      });
    } else {  // registers do not suffice
      exists = walk.begin(piece);
    }
    if (threadIdx.x == 0) {
      shared.exists = exists;
      shared.span_length = walk.spans().length;
    }
  }
  __syncthreads();
  constexpr int kBefore = latent_first_registers(K);
  static_assert(2 * kRegisters.owners + kScorers * kRegisters.scorers + kRegisters.copies ==
                (3 + kScorers) * kBefore);
  if (threadIdx.x < 256) {
    take_registers<kBefore, kRegisters.owners>();
    if constexpr (kScorers > 0) {
      LatentOwner<K>(p, shared).run();
    } else {
      LatentConsumer<K>(p, shared).run();
    }
  } else if (threadIdx.x >= 256 + 128 * kScorers) {
    take_registers<kBefore, kRegisters.copies>();
    LatentLoads<K>(p, shared).run();
  } else if constexpr (kScorers > 0) {
    take_registers<kBefore, kRegisters.scorers>();
    LatentScorer<K>(p, shared).run();
  }
}

}  // namespace tessera::cuda::sm90
