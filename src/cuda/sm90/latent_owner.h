// Who owns outputs of the latent kernel (latent.h) where values are of 8 bits: two warpgroups, each
// of half of the columns. Values become fp16 on their way from shared memory to registers, from
// where wgmma takes its first operand; weights are made by others (latent_scorer.h).
#pragma once

#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/latent_results.h"
#include "cuda/sm90/latent_scorer.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
class LatentOwner {
  static constexpr int kN = K.block_m, kKeys = K.block_n;
  static constexpr int kMine = K.head_dim_v / 128;  ///< chunks of 64 columns of O
  static constexpr int kChunks = kMine / 2;         ///< and of values, a group of columns each
  static constexpr int kSteps = kKeys / 16;
  /// Bytes from one row of values to the next, and from one group of columns.
  static constexpr std::uint32_t kRow = latent_chunked(K) ? 128 : latent_row_bytes(K);
  static constexpr std::uint32_t kChunk = latent_chunked(K) ? kKeys * 128 : 128;
  static constexpr int kWeights = latent_weights(K), kScorers = core::decode_scorers(K);
  /// So many chunks of 16 keys become operands while those before are multiplied.
  static constexpr int kAtOnce = 1;
  using Wgmma = ptx::Wgmma<Dtype::f16, kN>;

 public:
  __device__ __forceinline__ LatentOwner(const mma::DecodeParams& params, LatentShared<K>& shared)
      : p(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    std::uint32_t pieces = 0;
#pragma unroll 1
    for (bool more = shared_.exists; agreed(more); more = walk().advance(piece())) {
#pragma unroll
      for (auto& chunk : o_) {
#pragma unroll
        for (float& x : chunk) x = 0.0F;
      }
#pragma unroll 1
      for (int tile = piece().tiles.begin; agreed(tile < piece().tiles.end); ++tile) {
        rings().keys.wait_full(item_);
        rings().weights.wait_full(item_);
        const LatentTold<K>& told = this->told();
        if (agreed(told.changes)) {
          if (agreed(told.skipped)) {
            release();
            continue;
          }
          rescale();
        }
        // The maker of weights multiplies first: what it makes is waited for.
        if (kScorers == 1 && agreed(tile + 1 < piece().tiles.end)) {
          rings().scored.wait_full(item_ + 1);
        }
        multiply_values();
        release();
      }
      rings().ends.wait_full(pieces);
      const mma::DecodeWalk<K> walk = this->walk();
      LatentResults<K> results(p, walk, piece(), shared_, o_);
      results.end_rows();
      if (lane() == 0) rings().ends.release(pieces);
      ++pieces;
      results.finish();
    }
  }

 private:
  // Made anew each time: there are few registers.

  __device__ __forceinline__ mma::DecodeWalk<K> walk() const {
    return {p, shared_.search, shared_.span_length};
  }
  __device__ __forceinline__ LatentRings<K> rings() const { return LatentRings<K>(shared_); }
  __device__ __forceinline__ const LatentTold<K>& told() const {
    return shared_.told[item_ % latent_weight_stages(K)];
  }
  /// Made anew each time: else addresses are known before the first block, and take registers.
  /// @{
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(ptx::opaque(threadIdx.x));
  }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  __device__ __forceinline__ mma::DecodePiece<K>& piece() const {
    return shared_.pieces[thread() / 32];
  }
  /// @}

  /// The block has been multiplied.
  __device__ __forceinline__ void release() {
    if (lane() == 0) {
      rings().keys.release(item_);
      rings().weights.release(item_);
    }
    ++item_;
  }
  /// Shifts of rows have been raised, or the greatest scale.
  __device__ __forceinline__ void rescale() {
    const float of_outputs = told().of_outputs;
    const float* const factors = told().factor + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const float factor = factors[i / 2 * 8 + i % 2] * of_outputs;
#pragma unroll
      for (int c = 0; c < kMine; ++c) {
        o_[c][i / 2 * 4 + i % 2] *= factor;
        o_[c][i / 2 * 4 + i % 2 + 2] *= factor;
      }
    }
  }

  /// O^T += V^T P^T, the warpgroup's columns. Of 16 columns the even ones are the first 8 rows.
  __device__ __forceinline__ void multiply_values() {
    constexpr std::uint32_t kStep = 16 * 128;
    const int lane = this->lane(), first = thread() / 128 * kChunks;
    // Of the warp's columns, as ldmatrix takes them.
    const int unit = lane / 16 * 4 + thread() / 32 % 4;
    const std::uint32_t values =
        rings().keys.buffer(item_) + lane % 16 * kRow + first * kChunk +
        static_cast<std::uint32_t>(latent_chunked(K) ? unit ^ lane % 8 : unit) * 16;
    const std::uint32_t weights =
        __shfl_sync(~0U, ptx::descriptor_across(rings().weights.buffer(item_), kKeys * 128), 0);
    const int first_weights = kWeights == 1 ? 0 : __shfl_sync(~0U, first, 0);
    constexpr int kBatches = kSteps * kChunks / kAtOnce;
    std::uint32_t words[2][kAtOnce][4], a[2][2 * kAtOnce][4];
    load_values(words[0], values, 0);
#pragma unroll
    for (int c = 0; c < kMine; ++c) ptx::wgmma_results(o_[c]);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      if (batch >= 2) ptx::wgmma_wait<1>();
      const int step = batch * kAtOnce / kChunks, begin = batch * kAtOnce % kChunks;
      if (batch + 1 < kBatches) load_values(words[(batch + 1) % 2], values, batch + 1);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::uint32_t* const from = words[batch % 2][i];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          std::uint32_t* const x = a[batch % 2][2 * i + j];
          ptx::widen_four<K.cached>(ptx::permute<0x6420>(from[2 * j], from[2 * j + 1]), x[0], x[2]);
          ptx::widen_four<K.cached>(ptx::permute<0x7531>(from[2 * j], from[2 * j + 1]), x[1], x[3]);
          if constexpr (kWeights == 1) {
            const std::uint32_t(&shares)[2] = told().shares[first + begin + i][lane % 4][step];
#pragma unroll
            for (int n = 0; n < 4; ++n) x[n] = ptx::multiply_pairs(x[n], shares[n / 2]);
          }
        }
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int c = 0; c < 2 * kAtOnce; ++c) {
        // Weights of a group, of which several may lie in a key's 128 bytes.
        const int w = kWeights == 1 ? 0 : first_weights + begin + c / 2;
        const std::uint32_t at = w * kN / 64 * kKeys * 128 + w * kN % 64 * 2 + step * kStep;
        Wgmma::registers_across(o_[2 * begin + c], a[batch % 2][c],
                                ptx::descriptor(weights + at / 16), 1);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < kMine; ++c) ptx::wgmma_results(o_[c]);
  }
  /// The warp's 16 columns of 16 keys, in both halves of chunks.
  __device__ __forceinline__ static void load_values(std::uint32_t (&words)[kAtOnce][4],
                                                     std::uint32_t values, int batch) {
    const int step = batch * kAtOnce / kChunks, begin = batch * kAtOnce % kChunks;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      ptx::load_matrices_across(words[i], values + step * 16 * kRow + (begin + i) * kChunk);
    }
  }

  const mma::DecodeParams& p;
  LatentShared<K>& shared_;
  std::uint32_t item_ = 0;
  float o_[kMine][kN / 2];
};

}  // namespace tessera::cuda::sm90
