// What becomes of O^T at the end of a piece of the latent kernel (latent.h): the result, where the
// item has no other part, else one of its parts. They are merged in the tree of all decoding
// (mma/decode_parts.h).
#pragma once

#include "core/softmax.h"
#include "core/storage.h"
#include "cuda/mma/decode_parts.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/latent_loads.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::sm90 {

/// Of a consuming thread: of every 8 rows it sees to one, and of that to pairs of columns.
template <core::Kernel K>
class LatentResults {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kN = K.block_m;
  static constexpr int kMine = K.head_dim_v / 128;
  static constexpr int kRows = kN / 8;             ///< of the thread
  static constexpr int kPairs = 2 * kMine;         ///< of columns, that a thread has of a row
  static constexpr int kAtOnce = kN > 32 ? 1 : 2;  ///< rows of a part that a thread asks for
  static constexpr int kRowsReady = 5;             ///< a named barrier

 public:
  /// o: of the warpgroup's columns, as wgmma has left them.
  __device__ __forceinline__ LatentResults(const mma::DecodeParams& params,
                                           const mma::DecodeWalk<K>& walk,
                                           const mma::DecodePiece& piece, LatentShared<K>& shared,
                                           float (&o)[kMine][kN / 2])
      : p(params),
        piece_(piece),
        shared_(shared),
        parts_(params, walk, piece),
        o_(o),
        thread_(ptx::opaque(threadIdx.x)),
        group_(static_cast<int>(thread_) / 128),
        warp_(static_cast<int>(thread_) / 32 % 4),
        lane_(thread_ % 32) {}

  /// sum: of the rows whose weights the thread has made.
  __device__ __forceinline__ void finish(const float (&sum)[kN / 4]) {
    end_rows_of_part(sum);
    normalise();
    const int part = parts_.part(), parts = parts_.count();
    if (parts > 1) {
      if (p.parts.by_unit) {
        store();
        if (!parts_.merges()) return;
        clear();
      }
#pragma unroll 1
      for (int shift = 0;; shift += core::PartTree::kShift) {
        const mma::OtherParts others = parts_.others(part, parts, shift);
        if (others.count == 0) break;
#pragma unroll 1
        for (int i = 0; i < others.count; ++i) take_in(others.slot + (i << others.shift));
      }
      end_rows();
    }
    if (part == 0) {
      write();
    } else {
      store();
    }
  }

 private:
  __device__ __forceinline__ int row_of(int c) const {
    return 8 * c + static_cast<int>(lane_ % 4) * 2 + static_cast<int>(lane_ / 4 & 1);
  }
  __device__ __forceinline__ bool exists(int c) const { return row_of(c) < piece_.rows; }
  /// The first of the i-th pair's columns.
  __device__ __forceinline__ int column_of(int i) const {
    return (group_ * kMine + i / 2) * 64 + warp_ * 16 + i % 2 * 8 +
           static_cast<int>(lane_ / 4 & ~1U);
  }
  __device__ __forceinline__ float* pair(int c, int i) const {
    return o_[i / 2] + 4 * c + i % 2 * 2;
  }
  __device__ __forceinline__ mma::DecodeRow place(int row) const {
    mma::DecodeRow at = mma::row_of<K>(piece_, p.group, row);
    at.member += piece_.head * p.group.value();
    return at;
  }

  // ---- a part's own rows ----

  /// O over its sums; threads of neighbouring columns exchange, so that each gets two columns of
  /// one of the rows.
  __device__ __forceinline__ void normalise() {
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      const float factor = factors()[row_of(c)], log2 = logarithms()[row_of(c)];
      state_[c] = {log2, log2 == -core::kInfinity ? 0.0F : 1.0F};
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float* const x = pair(c, i);
        std::uint32_t low = __float_as_uint(x[0]), high = __float_as_uint(x[1]);
        swap_in_pair<4>(lane_, low, high);
        x[0] = __uint_as_float(low) * factor;
        x[1] = __uint_as_float(high) * factor;
      }
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      state_[c] = {};
#pragma unroll
      for (int i = 0; i < kPairs; ++i) pair(c, i)[0] = pair(c, i)[1] = 0.0F;
    }
  }
  /// Merged rows over their sums.
  __device__ __forceinline__ void end_rows() {
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      const float factor = core::inverse_sum(state_[c]);
      state_[c] = core::from_lse(core::lse_of(state_[c]));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        pair(c, i)[0] *= factor;
        pair(c, i)[1] *= factor;
      }
    }
  }
  /// The natural logarithm of a row's sum.
  __device__ __forceinline__ float lse_of(int c) const { return core::lse_of(state_[c]); }

  /// The result.
  __device__ __forceinline__ void write() const {
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      if (!exists(c)) continue;
      const mma::DecodeRow at = place(row_of(c));
      auto* const row = static_cast<std::uint16_t*>(p.o) +
                        piece_.sequence.query_offset(p.o_strides, at.query, at.member);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int column = column_of(i);
        if (column >= p.head_dim_v) continue;
        *reinterpret_cast<std::uint32_t*>(row + column) =
            ptx::pack<kType>(pair(c, i)[0], pair(c, i)[1]);
      }
      if (column_of(0) > 0 || p.softmax_lse == nullptr) continue;
      p.softmax_lse[piece_.sequence.lse_index(p.lse_head, p.num_heads, at.member, at.query)] =
          lse_of(c);
    }
  }

  // ---- rows ----

  /// Between pieces, in place of weights. Of a row: the warps' sums of weights; what its outputs
  /// are to be multiplied by; the base-2 logarithm of its sum.
  /// @{
  __device__ __forceinline__ float* sums() const {  // [8 warps][rows]
    static_assert(10 * kN * 4 <= sizeof shared_.weights);
    return reinterpret_cast<float*>(shared_.weights);
  }
  __device__ __forceinline__ float* factors() const { return sums() + 8 * kN; }
  __device__ __forceinline__ float* logarithms() const { return sums() + 9 * kN; }
  /// @}
  __device__ __forceinline__ void end_rows_of_part(const float (&sum)[kN / 4]) const {
    // Nobody reads weights any more.
    ptx::barrier_sync(kRowsReady, 256);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      float all = sum[i];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) all += __shfl_xor_sync(~0U, all, lanes);
      if (lane_ < 4) {
        sums()[(group_ * 4 + warp_) * kN + i / 2 * 8 + static_cast<int>(lane_) * 2 + i % 2] = all;
      }
    }
    ptx::barrier_sync(kRowsReady, 256);
    const int row = static_cast<int>(thread_);
    if (row < kN) {
      core::Softmax<float> state = {shared_.shift[row], 0.0F};
#pragma unroll
      for (int w = 0; w < 8; ++w) state.sum += sums()[w * kN + row];
      // A row's sink enters with its first part.
      const bool has_sink = p.sink != nullptr && piece_.units.begin == 0 && row < piece_.rows;
      const core::FinishedRow<float> end =
          core::finish(state, has_sink, has_sink ? p.sink[place(row).member] : 0.0F);
      factors()[row] = end.factor;
      logarithms()[row] = core::from_lse(core::lse_of(end.state)).max;
    }
    ptx::barrier_sync(kRowsReady, 256);
  }

  // ---- parts ----

  /// core::PartWord's bits: the thread's first of a slot. The others are at word().
  __device__ __forceinline__ uint4* words_of(int slot) const {
    static_assert(sizeof(core::PartWord) == sizeof(uint4));
    return reinterpret_cast<uint4*>(p.parts.words) +
           (std::int64_t{slot} * kN + row_of(0)) * (K.head_dim_v / 2) + column_of(0) / 2;
  }
  __device__ __forceinline__ static constexpr int word(int c, int i) {
    return c * 8 * (K.head_dim_v / 2) + i / 2 * 32 + i % 2 * 4;
  }
  /// For whoever takes it in.
  __device__ __forceinline__ void store() const {
    uint4* const to = words_of(parts_.slot());
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      if (!exists(c)) continue;
      const std::uint32_t lse = __float_as_uint(lse_of(c));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float* const x = pair(c, i);
        ptx::store_relaxed(to + word(c, i), uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), lse,
                                                  p.parts.ticket});
      }
    }
  }
  /// Merges a part with what the thread has, as soon as it is there.
  __device__ __forceinline__ void take_in(int slot) {
    uint4* const from = words_of(slot);
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      uint4 words[kAtOnce][kPairs];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            // A row that does not exist has seen no key.
            words[n][i] = {0, 0, __float_as_uint(-core::kInfinity), p.parts.ticket};
            if (exists(first + n)) words[n][i] = ptx::load_relaxed(from + word(first + n, i));
          }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
          for (int i = 0; i < kPairs; ++i) there &= words[n][i].w == p.parts.ticket;
        }
      } while (!there);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        add(first + n, words[n]);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          // A replay must not find it.
          if (exists(first + n)) from[word(first + n, i)] = uint4{};
        }
      }
    }
  }
  /// A part's pairs of a row, which all tell the row's lse.
  __device__ __forceinline__ void add(int c, const uint4 (&words)[kPairs]) {
    core::Softmax<float>& mine = state_[c];
    const float part = core::from_lse(__uint_as_float(words[0].z)).max;
    const float top = core::max(mine.max, part), shift = core::shift_of(top);
    const float before = ptx::ex2(mine.max - shift), weight = ptx::ex2(part - shift);
    mine = {top, mine.sum * before + weight};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float* const x = pair(c, i);
      x[0] = fmaf(__uint_as_float(words[i].x), weight, x[0] * before);
      x[1] = fmaf(__uint_as_float(words[i].y), weight, x[1] * before);
    }
  }

  const mma::DecodeParams& p;
  const mma::DecodePiece& piece_;
  LatentShared<K>& shared_;
  const mma::ItemParts<K> parts_;
  float (&o_)[kMine][kN / 2];
  /// Made anew each time: through all pieces nothing is kept of it in registers.
  const std::uint32_t thread_;
  const int group_, warp_;
  const std::uint32_t lane_;
  core::Softmax<float> state_[kRows];
};

}  // namespace tessera::cuda::sm90
