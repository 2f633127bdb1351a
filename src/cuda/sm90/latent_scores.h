// Scores of a block of keys of the latent kernel (latent.h), and what must be known of them before
// weights are made: which are hidden, and whether they exceed what weights are powers of two of.
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/sm90/latent_loads.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::sm90 {

/// Of a warpgroup that makes weights.
template <core::Kernel K>
class LatentScores {
 protected:
  static constexpr int kN = K.block_m, kKeys = K.block_n;
  static constexpr int kRowsOfThread = kN / 4;  ///< 2 neighbours of each 8
  static_assert(kKeys == 64);

  __device__ __forceinline__ LatentScores(const mma::DecodeParams& params, LatentShared<K>& shared)
      : p(params), shared_(shared), piece_(shared.pieces[threadIdx.x / 32]) {}

  /// Where there are few registers, made anew each time: else addresses are known before the first
  /// block, and take some.
  /// @{
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(core::widens(K) ? ptx::opaque(threadIdx.x) : threadIdx.x);
  }
  __device__ __forceinline__ static int warp() { return thread() / 32 % 4; }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  __device__ __forceinline__ mma::DecodePiece<K>& piece() const {
    return core::widens(K) ? shared_.pieces[thread() / 32] : piece_;
  }
  /// @}

  __device__ __forceinline__ core::SequenceMask mask() const {
    return p.mask.of(p.sequences, piece().sequence);
  }
  /// The thread's i-th row, and of its first: from there.
  /// @{
  __device__ __forceinline__ static int first_row() { return lane() % 4 * 2; }
  __device__ __forceinline__ static constexpr int row_of(int i) { return i / 2 * 8 + i % 2; }
  /// @}
  __device__ __forceinline__ int query_of(int row) const {
    return mma::row_of<K>(piece(), p.group, core::min(row, core::max(piece().rows - 1, 0))).query;
  }
  /// Tiles of the piece whose keys all rows see; none where pages may be skipped.
  __device__ __forceinline__ core::Range common_tiles() const {
    if (p.cache.pages.skips) return {0, 0};
    return piece().keys.inside(mask().common_keys({query_of(0), query_of(piece().rows - 1) + 1}));
  }
  /// Of the thread's i-th row and its half-th key.
  __device__ __forceinline__ float& score(int i, int half) {
    return s_[i / 2 * 4 + i % 2 + 2 * half];
  }

  /// Products of keys that a row does not see become -inf. keys: of a block, whose item it is.
  __device__ __forceinline__ void hide(const core::Range& keys, std::uint32_t item) {
    static_assert(kN / 2 <= 32);
    std::uint32_t hidden = 0;
    if (p.cache.pages.skips) {  // keys have no positions, and are seen by all or by nobody
      const std::uint32_t skipped = shared_.skipped[item % latent_stages(K)][warp()] >> lane() / 4;
      hidden = (skipped & 1) * 0x33333333U | (skipped >> 8 & 1) * 0xCCCCCCCCU;
    } else {
      const core::SequenceMask mask = this->mask();
      const int first = keys.begin + warp() * 16 + lane() / 4;
      const int first_row = this->first_row();
#pragma unroll 1
      for (int i = 0; i < kRowsOfThread; ++i) {
        const core::QueryMask seen = mask.of(query_of(first_row + row_of(i)));
        for (int half = 0; half < 2; ++half) {
          const int key = first + 8 * half;
          if (key >= keys.end || !seen.visible(key)) {
            hidden |= 1U << (i / 2 * 4 + i % 2 + 2 * half);
          }
        }
      }
    }
    if (!__any_sync(~0U, hidden != 0)) return;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if ((hidden >> i & 1) != 0) s_[i] = -core::kInfinity;
    }
  }

  /// What products of the thread's i-th row are multiplied by.
  __device__ __forceinline__ float pre(int i) const {
    if constexpr (latent_pairs(K)) return shared_.roles.query_factors[first_row() + row_of(i)];
    return p.score.pre;
  }
  /// Products become what weights are powers of two of. Whether a shift must be raised: a weight
  /// would be large, or a row has seen no key before. NaN raises none.
  __device__ __forceinline__ bool shift() {
    bool fresh = false;
    float top = -core::kInfinity;
    const float* shifts;
    if constexpr (core::widens(K)) {
      fresh = shared_.shift.lacks;
      shifts = shared_.shift.applied + first_row();
    } else {
      shifts = shared_.shift.of + first_row();
    }
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      float shift = shifts[row_of(i)];
      if constexpr (!core::widens(K)) {
        fresh = fresh || shift == -core::kInfinity;
        shift = core::shift_of(shift);
      }
      const float pre = this->pre(i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = score(i, half);
        x = fmaf(x, pre, -shift);
        top = fmaxf(top, x);
      }
    }
    return fresh || top > kSlack;
  }

  /// A row's shift that is raised, if it is.
  struct Raised {
    float before, after;

    /// What weights, and sums of them, become.
    __device__ __forceinline__ float factor() const {
      return after == -core::kInfinity ? 1.0F : ptx::ex2(before - after);
    }
  };
  /// A warp's greatest scores, to [4 warps][rows].
  __device__ __forceinline__ void leave_tops(float* tops) {
    const int lane = this->lane();
    float* const to = tops + warp() * kN + first_row();
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      float top = fmaxf(score(i, 0), score(i, 1));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0U, top, lanes));
      }
      if (lane < 4) to[row_of(i)] = top;
    }
  }
  /// By these.
  __device__ __forceinline__ Raised raised(const float* tops, int row) const {
    const float most =
        fmaxf(fmaxf(tops[row], tops[kN + row]), fmaxf(tops[2 * kN + row], tops[3 * kN + row]));
    const float before = shared_.shift.of[row];
    return {before, fmaxf(before, most + core::shift_of(before))};
  }
  /// The thread's i-th row goes by it.
  __device__ __forceinline__ void follow(int i, const Raised& shift) {
    const float change = core::shift_of(shift.after) - core::shift_of(shift.before);
    score(i, 0) -= change;
    score(i, 1) -= change;
  }

  const mma::DecodeParams& p;
  LatentShared<K>& shared_;
  float s_[kN / 2];

 private:
  mma::DecodePiece<K>& piece_;
};

}  // namespace tessera::cuda::sm90
