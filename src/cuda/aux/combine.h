// Merging partial results on any GPU (S7): every part left a normalised output and a natural-log
// lse. Some lanes of a warp share a row: each makes the weights of its splits, once, and adds up
// columns of all of them, in the order of the splits. Memory is the limit, so the loads of several
// splits are under way together.
#pragma once

#include "core/softmax.h"
#include "cuda/aux/combine_params.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::aux {

/// Columns that 16 bytes of a part's row hold.
template <Dtype kPart>
inline constexpr int kPartColumns = 16 / static_cast<int>(size_of(kPart));

/// 16 bytes of a part's row as fp32. `at`: elements from the first one.
template <Dtype kPart>
__device__ __forceinline__ void load_columns(const void* parts, std::int64_t at, float* x) {
  const auto* const from = static_cast<const char*>(parts) + at * size_of(kPart);
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kPart == Dtype::f32) {
      x[i] = __uint_as_float(word[i]);
    } else {
      x[2 * i] = ptx::widen<kPart>(static_cast<std::uint16_t>(word[i]));
      x[2 * i + 1] = ptx::widen<kPart>(static_cast<std::uint16_t>(word[i] >> 16));
    }
  }
}

/// One element.
template <Dtype kPart>
__device__ __forceinline__ float load_column(const void* parts, std::int64_t at) {
  if constexpr (kPart == Dtype::f32) {
    return static_cast<const float*>(parts)[at];
  } else {
    return ptx::widen<kPart>(static_cast<const std::uint16_t*>(parts)[at]);
  }
}

/// Four neighbouring elements of o, of which `left` exist. `at`: elements from the first one.
__device__ __forceinline__ void store_columns(const CombineParams& p, std::int64_t at, int left,
                                              const float* x) {
  static_assert(kPlainDtypes == 3);
  if (!p.o_aligned || left < 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) store_float(p.o, p.dtype_o, at + i, x[i]);
    }
  } else if (p.dtype_o == Dtype::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.o) + at) = float4{x[0], x[1], x[2], x[3]};
  } else {
    const bool bf16 = p.dtype_o == Dtype::bf16;
    std::uint32_t pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pair[i] = bf16 ? ptx::pack<Dtype::bf16>(x[2 * i], x[2 * i + 1])
                     : ptx::pack<Dtype::f16>(x[2 * i], x[2 * i + 1]);
    }
    ptx::store_if(true, static_cast<std::uint16_t*>(p.o) + at, pair[0], pair[1]);
  }
}

/// One row by p.lanes neighbouring lanes. All lanes of a warp come here together, also those that
/// have no row (`exists`).
template <Dtype kPart>
class CombinedRow {
 public:
  __device__ __forceinline__ CombinedRow(const CombineParams& params, std::int64_t row, int lane)
      : p(params), exists_(row < params.rows), lane_(lane) {
    std::int64_t index = exists_ ? row : 0;
    const std::int64_t head = index % p.heads;
    index /= p.heads;
    const std::int64_t query = index % p.seqlen, batch = index / p.seqlen;
    const auto offset = [&](const core::Strides& s) {
      return batch * s.batch + query * s.seqlen + head * s.head;
    };
    part_ = offset(p.o_parts.strides);
    lse_ = static_cast<const float*>(p.lse_parts.data) + offset(p.lse_parts.strides);
    o_ = offset(p.o_strides);
    to_lse_ = offset(p.lse_strides);
  }

  __device__ __forceinline__ void run() {
    merge();
#pragma unroll 1
    for (int column = 0; column < p.head_dim; column += p.lanes * kLaneColumns) add_up(column);
    if (exists_ && lane_ == 0 && p.softmax_lse != nullptr) {
      p.softmax_lse[to_lse_] = core::lse_of(merged_);
    }
  }

 private:
  static constexpr int kColumns = kPartColumns<kPart>;  ///< of a load
  /// Splits; no more than the fewest lanes, as each has the weight of one.
  static constexpr int kInFlight = 4;

  __device__ __forceinline__ core::Softmax<float> state_of(int split) const {
    return core::from_lse(lse_[split * p.lse_split]);
  }

  /// The state of all splits, the same bits in every lane.
  __device__ __forceinline__ void merge() {
#pragma unroll 1
    for (int split = lane_; split < p.splits; split += p.lanes) {
      merged_ = core::combine(merged_, state_of(split));
    }
#pragma unroll 1
    for (int i = 1; i < p.lanes; i *= 2) {
      const core::Softmax<float> other = {__shfl_xor_sync(~0U, merged_.max, i),
                                          __shfl_xor_sync(~0U, merged_.sum, i)};
      const bool first = (lane_ & i) == 0;
      merged_ = core::combine(first ? merged_ : other, first ? other : merged_);
    }
  }

  /// The columns from `column` on that fit into the lanes.
  __device__ __forceinline__ void add_up(int column) {
    float sum[kLaneColumns] = {};
#pragma unroll 1
    for (int first = 0; first < p.splits; first += p.lanes) {
      const int mine = first + lane_;
      const float weight = mine < p.splits ? core::weight_of(state_of(mine), merged_) : 0.0F;
      const int count = core::min(p.lanes, p.splits - first);
      if (p.parts_aligned) {
#pragma unroll 1
        for (int s = 0; s < count; s += kInFlight) add(column, first, s, weight, sum);
      } else {
#pragma unroll 1
        for (int s = 0; s < count; ++s) add_elements(column, first, s, weight, sum);
      }
    }
    if (!exists_) return;
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      const int at = column_of(column, i);
      store_columns(p, o_ + at, p.head_dim - at, sum + i);
    }
  }

  /// Splits first + s and the next ones. What has no weight is not read: it may hold anything.
  __device__ __forceinline__ void add(int column, int first, int s, float weight,
                                      float (&sum)[kLaneColumns]) const {
    float weights[kInFlight], x[kInFlight][kLaneColumns];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      weights[i] = __shfl_sync(~0U, weight, s + i, p.lanes);
      const bool reads = exists_ && weights[i] != 0.0F;
      const std::int64_t part = part_ + (first + s + i) * p.o_split;
#pragma unroll
      for (int load = 0; load < kLaneColumns; load += kColumns) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) x[i][load + c] = 0.0F;
        const int at = column_of(column, load);
        if (reads && at < p.head_dim) {
          load_columns<kPart>(p.o_parts.data, part + at, x[i] + load);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sum[c] += weights[i] * x[i][c];
    }
  }

  /// The same for one split that may begin anywhere and end in the middle of 16 bytes.
  __device__ __forceinline__ void add_elements(int column, int first, int s, float weight,
                                               float (&sum)[kLaneColumns]) const {
    weight = __shfl_sync(~0U, weight, s, p.lanes);
    if (!exists_ || weight == 0.0F) return;
    const std::int64_t part = part_ + (first + s) * p.o_split;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const int at = column_of(column, c);
      if (at < p.head_dim) sum[c] += weight * load_column<kPart>(p.o_parts.data, part + at);
    }
  }

  /// Of the lane's element i: neighbouring lanes hold neighbouring loads.
  __device__ __forceinline__ int column_of(int column, int i) const {
    return column + (i / kColumns * p.lanes + lane_) * kColumns + i % kColumns;
  }

  const CombineParams& p;
  const bool exists_;
  const int lane_;       ///< of those that share the row
  std::int64_t part_;    ///< elements from o_parts to the row of the first split
  const float* lse_;     ///< of the first split
  std::int64_t o_;       ///< elements from o to the row
  std::int64_t to_lse_;  ///< elements from softmax_lse
  core::Softmax<float> merged_;
};

/// The kernel, for parts of one type.
template <Dtype kPart>
__device__ __forceinline__ void combine(const CombineParams& p) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block < p.blocks(); block += gridDim.x) {
    const std::int64_t row = block * p.rows_of_block() + thread / p.lanes;
    CombinedRow<kPart>(p, row, thread % p.lanes).run();
  }
}

}  // namespace tessera::cuda::aux
