// What becomes of O^T at the end of a piece of the latent kernel (latent.h): the result, where the
// item has no other part, else one of its parts. They are merged in the tree of all decoding
// (mma/decode_parts.h), but from memory: a block's own part lies there, too.
#pragma once

#include "core/softmax.h"
#include "core/storage.h"
#include "cuda/mma/decode_parts.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/latent_loads.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::sm90 {

/// Of a consuming thread. Of every 8 rows it sees to one, and of that to pairs of columns.
template <core::Kernel K>
class LatentResults {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kN = K.block_m;
  static constexpr int kMine = K.head_dim_v / 128;
  static constexpr int kPairs = 2 * kMine;  ///< of columns, that a thread has of a row
  static constexpr int kAsked = 3;          ///< parts that a thread asks for at once
  static constexpr int kSumsReady = 5;      ///< a named barrier

 public:
  __device__ __forceinline__ LatentResults(const mma::DecodeParams& params,
                                           const mma::DecodeWalk<K>& walk,
                                           const mma::DecodePiece& piece, LatentShared<K>& shared)
      : p(params),
        piece_(piece),
        shared_(shared),
        parts_(params, walk, piece),
        group_(static_cast<int>(threadIdx.x) / 128),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(threadIdx.x % 32) {}

  /// o: of the warpgroup's columns; sum: of the rows whose weights the thread has made.
  __device__ __forceinline__ void finish(float (&o)[kMine][kN / 2],
                                         const float (&sum)[kN / 4]) const {
    share_sums(sum);
    const bool whole = parts_.count() == 1, merges = !whole && parts_.merges();
    // What others are yet to be added to nobody may take for the part.
    const std::uint32_t ticket = merges && !p.parts.by_unit ? 0 : p.parts.ticket;
#pragma unroll
    for (int c = 0; c < kN / 8; ++c) {
      // Made anew each time: there are no registers for what all rows have in common.
      const int row = static_cast<int>(ptx::opaque(static_cast<std::uint32_t>(row_of(c))));
      const bool exists = row < piece_.rows;
      const Place at = place(exists ? row : 0);
      const core::Softmax<float> state = {sums()[8 * kN + row], sum_of(row)};
      // A row's sink enters with its first part.
      const bool has_sink = p.sink != nullptr && piece_.units.begin == 0;
      const core::FinishedRow<float> end =
          core::finish(state, has_sink, has_sink ? p.sink[at.head] : 0.0F);
      const float lse = core::lse_of(end.state);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        // Threads of neighbouring columns exchange: each gets two columns of one of the rows.
        std::uint32_t low = __float_as_uint(o[i / 2][4 * c + i % 2 * 2]);
        std::uint32_t high = __float_as_uint(o[i / 2][4 * c + i % 2 * 2 + 1]);
        swap_in_pair<4>(lane_, low, high);
        const float x[2] = {__uint_as_float(low) * end.factor, __uint_as_float(high) * end.factor};
        if (!exists) continue;
        if (whole) {
          write(at, column_of(i), x, lse);
        } else {
          store(own_slot(), row, column_of(i), x, lse, ticket);
        }
      }
    }
    if (!merges) return;
#pragma unroll 1
    for (int c = 0; c < kN / 8; ++c) merge(row_of(c));
  }

 private:
  struct Place {
    int query, head;
  };
  /// Some pairs of columns of a row, over the sum of its state.
  struct Columns {
    core::Softmax<float> state;
    float x[kPairs][2] = {};
  };

  __device__ __forceinline__ Place place(int row) const {
    const mma::DecodeRow at = mma::row_of<K>(piece_, p.group, row);
    return {at.query, piece_.head * p.group.value() + at.member};
  }
  __device__ __forceinline__ int row_of(int c) const {
    return 8 * c + static_cast<int>(lane_ % 4) * 2 + static_cast<int>(lane_ / 4 & 1);
  }
  /// The first of the i-th pair's columns.
  __device__ __forceinline__ int column_of(int i) const {
    return (group_ * kMine + i / 2) * 64 + warp_ * 16 + i % 2 * 8 +
           static_cast<int>(lane_ / 4 & ~1U);
  }

  // ---- sums of weights ----

  /// Of all keys of all warps; and shifts, which may change when one begins another piece.
  __device__ __forceinline__ void share_sums(const float (&sum)[kN / 4]) const {
    float* const sums = this->sums();
    // Nobody reads weights any more.
    ptx::barrier_sync(kSumsReady, 256);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      float all = sum[i];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) all += __shfl_xor_sync(~0U, all, lanes);
      if (lane_ < 4) {
        sums[(group_ * 4 + warp_) * kN + i / 2 * 8 + static_cast<int>(lane_) * 2 + i % 2] = all;
      }
    }
    if (threadIdx.x < kN) sums[8 * kN + threadIdx.x] = shared_.shift[threadIdx.x];
    ptx::barrier_sync(kSumsReady, 256);
  }
  /// [8 warps][rows], then shifts.
  __device__ __forceinline__ float* sums() const {
    static_assert(9 * kN * 4 <= sizeof shared_.weights);
    return reinterpret_cast<float*>(shared_.weights);
  }
  __device__ __forceinline__ float sum_of(int row) const {
    float all = 0.0F;
#pragma unroll
    for (int w = 0; w < 8; ++w) all += sums()[w * kN + row];
    return all;
  }

  // ---- parts ----

  /// Of the piece's part: where its item begins in the span, that has one of its own.
  __device__ __forceinline__ int own_slot() const {
    const bool begins = !p.parts.by_unit && parts_.part() == 0;
    return parts_.slot() + (begins ? p.span_count.value() : 0);
  }
  /// core::PartWord's bits.
  __device__ __forceinline__ uint4* word_at(int slot, int row, int column) const {
    static_assert(sizeof(core::PartWord) == sizeof(uint4));
    return reinterpret_cast<uint4*>(p.parts.words) +
           (std::int64_t{slot} * kN + row) * (K.head_dim_v / 2) + column / 2;
  }
  __device__ __forceinline__ void store(int slot, int row, int column, const float (&x)[2],
                                        float lse, std::uint32_t ticket) const {
    ptx::store_relaxed(
        word_at(slot, row, column),
        uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(lse), ticket});
  }

  /// The thread's columns of a row: of its own part and those that it takes in.
  __device__ __forceinline__ void merge(int row) const {
    if (row >= piece_.rows) return;
    const int part = parts_.part(), parts = parts_.count();
    Columns mine;
    if (!p.parts.by_unit) {
      uint4 words[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        words[i] = ptx::load_relaxed(word_at(own_slot(), row, column_of(i)));
      }
      add(mine, words);
    }
#pragma unroll 1
    for (int shift = 0;; shift += core::PartTree::kShift) {
      const mma::OtherParts others = parts_.others(part, parts, shift);
      if (others.count == 0) break;
#pragma unroll 1
      for (int first = 0; first < others.count; first += kAsked) {
        take_in(mine, row, others, first);
      }
    }
    const float factor = core::inverse_sum(mine.state);
    const float lse = core::lse_of(mine.state);
    const Place at = place(row);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float x[2] = {mine.x[i][0] * factor, mine.x[i][1] * factor};
      if (part == 0) {
        write(at, column_of(i), x, lse);
      } else {
        store(own_slot(), row, column_of(i), x, lse, p.parts.ticket);
      }
    }
  }
  /// As soon as they are there, in their order.
  __device__ __forceinline__ void take_in(Columns& mine, int row, const mma::OtherParts& from,
                                          int first) const {
    uint4 words[kAsked][kPairs];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int n = 0; n < kAsked; ++n) {
        const int slot = from.slot + ((first + n) << from.shift);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          // One that does not exist has seen no key.
          words[n][i] = {0, 0, __float_as_uint(-core::kInfinity), p.parts.ticket};
          if (first + n < from.count) {
            words[n][i] = ptx::load_relaxed(word_at(slot, row, column_of(i)));
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kAsked; ++n) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) there &= words[n][i].w == p.parts.ticket;
      }
    } while (!there);
#pragma unroll
    for (int n = 0; n < kAsked; ++n) {
      if (first + n >= from.count) continue;
      add(mine, words[n]);
      const int slot = from.slot + ((first + n) << from.shift);
      // A replay must not find it.
#pragma unroll
      for (int i = 0; i < kPairs; ++i) *word_at(slot, row, column_of(i)) = uint4{};
    }
  }
  /// A part's pairs of a row, which all tell the row's lse.
  __device__ __forceinline__ static void add(Columns& mine, const uint4 (&words)[kPairs]) {
    const float part = core::from_lse(__uint_as_float(words[0].z)).max;
    const float top = core::max(mine.state.max, part), shift = core::shift_of(top);
    const float before = ptx::ex2(mine.state.max - shift), weight = ptx::ex2(part - shift);
    mine.state = {top, mine.state.sum * before + weight};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      mine.x[i][0] = fmaf(__uint_as_float(words[i].x), weight, mine.x[i][0] * before);
      mine.x[i][1] = fmaf(__uint_as_float(words[i].y), weight, mine.x[i][1] * before);
    }
  }

  /// The result.
  __device__ __forceinline__ void write(const Place& at, int column, const float (&x)[2],
                                        float lse) const {
    if (column < p.head_dim_v) {
      auto* const to = static_cast<std::uint16_t*>(p.o) +
                       piece_.sequence.query_offset(p.o_strides, at.query, at.head) + column;
      *reinterpret_cast<std::uint32_t*>(to) = ptx::pack<kType>(x[0], x[1]);
    }
    if (column > 0 || p.softmax_lse == nullptr) return;
    p.softmax_lse[piece_.sequence.lse_index(p.lse_head, p.num_heads, at.head, at.query)] = lse;
  }

  const mma::DecodeParams& p;
  const mma::DecodePiece& piece_;
  LatentShared<K>& shared_;
  const mma::ItemParts<K> parts_;
  const int group_, warp_;
  const std::uint32_t lane_;
};

}  // namespace tessera::cuda::sm90
