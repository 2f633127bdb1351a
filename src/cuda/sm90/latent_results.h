// What becomes of O^T at the end of a piece of the latent kernel (latent.h): the result, where the
// item has no other part, else one of its parts. They are merged in the tree of all decoding
// (mma/decode_parts.h). Parts are large here, so a word says of a whole row that it is there, and a
// thread finds what its like in another block has left as it left it.
#pragma once

#include "core/softmax.h"
#include "core/storage.h"
#include "cuda/mma/decode_parts.h"
#include "cuda/ptx/barrier.h"
#include "cuda/sm90/latent_loads.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
class LatentResults {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kN = K.block_m;
  static constexpr int kMine = K.head_dim_v / 128;
  static constexpr int kRows = kN / 8;          ///< eights of rows
  static constexpr int kQuads = kMine * kRows;  ///< of O^T, that a thread has
  static constexpr int kOthers = core::PartTree::kOthers;
  // What a thread asks for at once, as its registers allow: quads of so many parts.
  static constexpr int kHeld = core::widens(K) ? (kN > 16 ? 4 : 8) : kN > 16 ? 16 : 32;
  static constexpr int kAsked = core::max(1, kHeld / kQuads);
  static constexpr int kAtOnce = core::min(kHeld, kQuads);
  static constexpr int kRowsReady = 5;  ///< a named barrier

 public:
  /// o: of the warpgroup's columns, as wgmma has left them.
  __device__ __forceinline__ LatentResults(const mma::DecodeParams& params,
                                           const mma::DecodeWalk<K>& walk,
                                           const mma::DecodePiece<K>& piece,
                                           LatentShared<K>& shared, float (&o)[kMine][kN / 2])
      : p(params),
        piece_(piece),
        shared_(shared),
        parts_(params, walk, piece),
        o_(o),
        thread_(ptx::opaque(threadIdx.x)),
        group_(static_cast<int>(thread_) / 128),
        warp_(static_cast<int>(thread_) / 32 % 4),
        lane_(thread_ % 32) {}

  /// What rows' sums and sinks make of them. sum: of the rows whose weights the thread has made.
  __device__ __forceinline__ void end_rows(const float (&sum)[kN / 4]) const {
    static_assert(1 + kOthers == 8);
    float* const sums = factors();  // [8 warps][rows]
    // Nobody reads weights any more.
    ptx::barrier_sync(kRowsReady, 256);
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      float all = sum[i];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) all += __shfl_xor_sync(~0U, all, lanes);
      if (lane_ < 4) {
        sums[(group_ * 4 + warp_) * kN + i / 2 * 8 + static_cast<int>(lane_) * 2 + i % 2] = all;
      }
    }
    ptx::barrier_sync(kRowsReady, 256);
    end_rows<8>(shared_.shift.of, sums);
  }
  /// The same of what makers of weights have told.
  __device__ __forceinline__ void end_rows() const {
    ptx::barrier_sync(kRowsReady, 256);
    const auto& end = shared_.roles.end;
    end_rows<4 * core::decode_scorers(K)>(end.shift, end.sums[0], end.lacks);
  }

  __device__ __forceinline__ void finish() {
    scale_by_weights();
    const int part = parts_.part(), parts = parts_.count();
    if (parts > 1) {
      if (p.parts.by_unit) {
        store();
        if (!parts_.merges()) return;
        forget();
      }
#pragma unroll 1
      for (int shift = 0;; shift += core::PartTree::kShift) {
        const mma::OtherParts others = parts_.others(part, parts, shift);
        if (others.count == 0) break;
#pragma unroll 1
        for (int i = 0; i < others.count; i += kOthers) {
          take_in({others.slot + (i << shift), shift, core::min(kOthers, others.count - i)});
        }
      }
    }
    if (part == 0) {
      write();
    } else {
      store();
    }
  }

 private:
  // ---- rows ----

  /// What becomes of rows of parts that are merged, of which the block's own is the first:
  /// [1 + kOthers][rows] factors; and the base-2 logarithms of rows' sums. Of values of 16 bits it
  /// lies where weights do, between pieces, and before that there are sums of weights, by warps.
  /// @{
  __device__ __forceinline__ float* factors() const {
    if constexpr (core::widens(K)) {
      return shared_.roles.rows[0];
    } else {
      static_assert((2 + kOthers) * kN * 4 <= sizeof shared_.weights);
      return reinterpret_cast<float*>(shared_.weights);
    }
  }
  __device__ __forceinline__ float* logarithms() const { return factors() + (1 + kOthers) * kN; }
  /// @}

  /// sums: [warps][rows]; lacks: what outputs lack besides.
  template <int kWarps>
  __device__ __forceinline__ void end_rows(const float* shift, const float* sums,
                                           float lacks = 1.0F) const {
    const int row = static_cast<int>(thread_);
    if (row < kN) {
      core::Softmax<float> state = {shift[row], 0.0F};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) state.sum += sums[w * kN + row];
      // A row's sink enters with its first part.
      const bool has_sink = p.sink != nullptr && piece_.units.begin == 0 && row < piece_.rows;
      const core::FinishedRow<float> end =
          core::finish(state, has_sink, has_sink ? p.sink[place(row).member] : 0.0F);
      factors()[row] = end.factor * lacks;
      logarithms()[row] = log2_of(end.state);
    }
    ptx::barrier_sync(kRowsReady, 256);
  }
  /// -inf: of a row that has seen no key.
  __device__ __forceinline__ static float log2_of(const core::Softmax<float>& row) {
    return row.sum == 0.0F ? -core::kInfinity : row.max + core::log2(row.sum);
  }
  __device__ __forceinline__ static core::Softmax<float> state_of(float log2) {
    return {log2, log2 == -core::kInfinity ? 0.0F : 1.0F};
  }
  __device__ __forceinline__ mma::DecodeRow place(int row) const {
    mma::DecodeRow at = mma::row_of<K>(piece_, p.group, row);
    at.member += piece_.head * p.group.value();
    return at;
  }

  // ---- quads of O^T: two columns, of two neighbouring rows ----

  __device__ __forceinline__ float* quad(int i) const { return o_[i / kRows] + i % kRows * 4; }
  /// What becomes of a quad's rows, of the own part and of the i-th of those taken in.
  __device__ __forceinline__ float2 factors_of(int part, int i) const {
    return *reinterpret_cast<const float2*>(factors() + part * kN + i % kRows * 8 + lane_ % 4 * 2);
  }
  /// The own part's.
  __device__ __forceinline__ void scale_by_weights() const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float2 factor = factors_of(0, row);
#pragma unroll
      for (int c = 0; c < kMine; ++c) {
        float* const x = quad(c * kRows + row);
        x[0] *= factor.x;
        x[1] *= factor.y;
        x[2] *= factor.x;
        x[3] *= factor.y;
      }
    }
  }
  /// As if the block had no part.
  __device__ __forceinline__ void forget() const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) quad(i)[n] = 0.0F;
    }
    if (thread_ < kN) logarithms()[thread_] = -core::kInfinity;
  }

  /// The result. A quad's columns are 8 apart, so threads of neighbouring ones exchange, and each
  /// gets two columns of one of the rows; but those of values of 8 bits are neighbours.
  __device__ __forceinline__ void write() const {
    if constexpr (core::widens(K)) {
      write_neighbours();
    } else {
      write_exchanged();
    }
    if (p.softmax_lse == nullptr || static_cast<int>(thread_) >= piece_.rows) return;
    const mma::DecodeRow at = place(static_cast<int>(thread_));
    p.softmax_lse[piece_.sequence.lse_index(p.lse_head, p.num_heads, at.member, at.query)] =
        core::lse_of(state_of(logarithms()[thread_]));
  }
  __device__ __forceinline__ std::uint16_t* output(int row) const {
    const mma::DecodeRow at = place(core::min(row, core::max(piece_.rows - 1, 0)));
    return static_cast<std::uint16_t*>(p.o) +
           piece_.sequence.query_offset(p.o_strides, at.query, at.member);
  }
  __device__ __forceinline__ void write_neighbours() const {
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 8 * c + static_cast<int>(lane_ % 4) * 2 + j;
        std::uint16_t* const to = output(row);
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
          const float* const x = o_[i] + 4 * c;
          const int column =
              (group_ * kMine + i) * 64 + warp_ * 16 + static_cast<int>(lane_ / 4) * 2;
          if (row >= piece_.rows || column >= p.head_dim_v) continue;
          *reinterpret_cast<std::uint32_t*>(to + column) = ptx::pack<kType>(x[j], x[2 + j]);
        }
      }
    }
  }
  __device__ __forceinline__ void write_exchanged() const {
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      const int row = 8 * c + static_cast<int>(lane_ % 4) * 2 + static_cast<int>(lane_ / 4 & 1);
      std::uint16_t* const to = output(row);
#pragma unroll
      for (int i = 0; i < 2 * kMine; ++i) {
        const float* const x = o_[i / 2] + 4 * c + i % 2 * 2;
        std::uint32_t low = __float_as_uint(x[0]), high = __float_as_uint(x[1]);
        swap_in_pair<4>(lane_, low, high);
        const int column = (group_ * kMine + i / 2) * 64 + warp_ * 16 + i % 2 * 8 +
                           static_cast<int>(lane_ / 4 & ~1U);
        if (row >= piece_.rows || column >= p.head_dim_v) continue;
        *reinterpret_cast<std::uint32_t*>(to + column) =
            ptx::pack<kType>(__uint_as_float(low), __uint_as_float(high));
      }
    }
  }

  // ---- parts ----

  /// A slot: [kQuads of a thread][256 threads] quads, then a word of each row: its logarithm and
  /// the launch's ticket.
  /// @{
  __device__ __forceinline__ float4* quads_of(int slot) const {
    static_assert(sizeof(core::PartWord) == sizeof(float4));
    return reinterpret_cast<float4*>(p.parts.words) + std::int64_t{slot} * core::part_words(K) +
           thread_;
  }
  __device__ __forceinline__ std::uint64_t* rows_of(int slot) const {
    return reinterpret_cast<std::uint64_t*>(
        p.parts.words + std::int64_t{slot} * core::part_words(K) + kQuads * 256);
  }
  /// @}
  /// For whoever takes it in.
  __device__ __forceinline__ void store() const {
    float4* const to = quads_of(parts_.slot());
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float* const x = quad(i);
      to[i * 256] = float4{x[0], x[1], x[2], x[3]};
    }
    ptx::barrier_sync(kRowsReady, 256);
    if (thread_ < kN) {
      ptx::store_release(
          rows_of(parts_.slot()) + thread_,
          std::uint64_t{p.parts.ticket} << 32 | __float_as_uint(logarithms()[thread_]));
    }
  }
  /// Merges parts with what the block has, as soon as they are there: kOthers at most.
  __device__ __forceinline__ void take_in(const mma::OtherParts& from) const {
    // Nobody reads the factors before any more.
    ptx::barrier_sync(kRowsReady, 256);
#pragma unroll 1
    for (int i = static_cast<int>(thread_); i < from.count * kN; i += 256) {
      std::uint64_t* const at = rows_of(from.slot + (i / kN << from.shift)) + i % kN;
      std::uint64_t word;
      do {
        word = ptx::load_acquire(at);
      } while (word >> 32 != p.parts.ticket);
      *at = 0;  // a replay must not find it
      factors()[kN + i] = __uint_as_float(static_cast<std::uint32_t>(word));
    }
    ptx::barrier_sync(kRowsReady, 256);
    if (thread_ < kN) merge_row(static_cast<int>(thread_), from.count);
    ptx::barrier_sync(kRowsReady, 256);
    scale_by_weights();
#pragma unroll 1
    for (int first = 0; first < from.count; first += kAsked) {
#pragma unroll
      for (int begin = 0; begin < kQuads; begin += kAtOnce) {
        add(from, first, begin);
      }
    }
  }
  /// Logarithms of a row in parts, the own and `others`, become factors, and the merged one's.
  __device__ __forceinline__ void merge_row(int row, int others) const {
    float* const factor = factors() + row;
    factor[0] = logarithms()[row];
    core::Softmax<float> merged;
#pragma unroll 1
    for (int i = 0; i <= others; ++i) merged.max = core::max(merged.max, factor[i * kN]);
    const float shift = core::shift_of(merged.max);
#pragma unroll 1
    for (int i = 0; i <= others; ++i) {
      factor[i * kN] = ptx::ex2(factor[i * kN] - shift);
      merged.sum += factor[i * kN];
    }
    const float inverse = core::inverse_sum(merged);
#pragma unroll 1
    for (int i = 0; i <= others; ++i) factor[i * kN] *= inverse;
    logarithms()[row] = log2_of(merged);
  }
  /// Some quads of some parts.
  __device__ __forceinline__ void add(const mma::OtherParts& from, int first, int begin) const {
    float4 x[kAsked][kAtOnce];
#pragma unroll
    for (int n = 0; n < kAsked; ++n) {
      const float4* const quads = quads_of(from.slot + ((first + n) << from.shift)) + begin * 256;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        x[n][i] = first + n < from.count ? quads[i * 256] : float4{};
      }
    }
#pragma unroll
    for (int n = 0; n < kAsked; ++n) {
      if (first + n >= from.count) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float2 factor = factors_of(1 + first + n, begin + i);
        float* const sum = quad(begin + i);
        sum[0] = fmaf(x[n][i].x, factor.x, sum[0]);
        sum[1] = fmaf(x[n][i].y, factor.y, sum[1]);
        sum[2] = fmaf(x[n][i].z, factor.x, sum[2]);
        sum[3] = fmaf(x[n][i].w, factor.y, sum[3]);
      }
    }
  }

  const mma::DecodeParams& p;
  const mma::DecodePiece<K>& piece_;
  LatentShared<K>& shared_;
  const mma::ItemParts<K> parts_;
  float (&o_)[kMine][kN / 2];
  /// Made anew each time: through all pieces nothing is kept of it in registers.
  const std::uint32_t thread_;
  const int group_, warp_;
  const std::uint32_t lane_;
};

}  // namespace tessera::cuda::sm90
