// Before and after the main kernel of the backward pass: a block of threads for every row block and
// head. What makes dQ of its sums is the architectures' own, as their order is.
#pragma once

#include "core/softmax.h"
#include "cuda/aux/backward_rows_params.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::aux {

/// A row block and head, and where its sequence lies.
struct RowPlace {
  int head;
  int first_query;  ///< of the block, counted in its sequence
  core::Sequence sequence;
  std::int64_t block;  ///< of all

  __device__ __forceinline__ explicit RowPlace(const BackwardRowParams& p) {
    std::int64_t index = blockIdx.x;
    head = static_cast<int>(index % p.heads);
    index /= p.heads;
    const int in_sequence = static_cast<int>(index % p.rows.blocks.per_sequence);
    sequence = p.sequences.at(static_cast<int>(index / p.rows.blocks.per_sequence));
    first_query = in_sequence * p.rows.blocks.block_m;
    block = p.rows.blocks.first_of(sequence) + in_sequence;
  }

  __device__ __forceinline__ bool has_rows() const { return first_query < sequence.seqlen_q; }

  /// Does any of the block's rows see a key?
  __device__ __forceinline__ bool sees_keys(const BackwardRowParams& p) const {
    const int end = core::min(first_query + p.rows.blocks.block_m, sequence.seqlen_q);
    return !p.window.band_of(sequence).keys_of(core::Range{first_query, end}).empty();
  }
  /// Where the block's part of dSink lies.
  __device__ __forceinline__ std::int64_t part(const BackwardRowParams& p) const {
    return (std::int64_t{head} * p.batch + sequence.batch) * p.rows.blocks.per_sequence +
           first_query / p.rows.blocks.block_m;
  }
  /// Elements from a tensor's first one to a query's row.
  __device__ __forceinline__ std::int64_t offset(const core::Strides& strides, int query) const {
    return sequence.query_offset(strides, query, head);
  }
};

/// Sum over all threads, in an order that is always the same; thread 0 has it.
__device__ __forceinline__ float sum_over_block(float x) {
  __shared__ float warps[kRowThreads / 32];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0U, x, i);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0F;
  for (const float part : warps) sum += part;
  return sum;
}

/// Sum of the products of 8 neighbouring elements of two rows, of which `left` exist.
template <Dtype kType>
__device__ __forceinline__ float dot8(const std::uint16_t* a, const std::uint16_t* b, int left,
                                      bool aligned) {
  float sum = 0.0F;
  if (aligned) {
    const uint4 x = *reinterpret_cast<const uint4*>(a), y = *reinterpret_cast<const uint4*>(b);
    const std::uint32_t u[4] = {x.x, x.y, x.z, x.w}, w[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum += ptx::widen<kType>(static_cast<std::uint16_t>(u[i])) *
             ptx::widen<kType>(static_cast<std::uint16_t>(w[i]));
      sum += ptx::widen<kType>(static_cast<std::uint16_t>(u[i] >> 16)) *
             ptx::widen<kType>(static_cast<std::uint16_t>(w[i] >> 16));
    }
  } else {
    for (int i = 0; i < core::min(left, 8); ++i)
      sum += ptx::widen<kType>(a[i]) * ptx::widen<kType>(b[i]);
  }
  return sum;
}

/// Shifts and deltas of the rows, delta = rowsum(dO * O) - dLSE; dQ's accumulators become 0, unless
/// somebody stores there. At least one block runs, also where there are no rows.
template <Dtype kType>
__device__ __forceinline__ void prepare_rows(const BackwardRowParams& p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.next_tile = 0;
  if (p.rows.blocks.per_sequence == 0) return;
  constexpr int kLanes = 8, kAtOnce = kRowThreads / kLanes;  // of a row; rows
  const RowPlace at(p);
  if (!at.has_rows()) {
    if (threadIdx.x == 0 && p.sink_parts != nullptr) p.sink_parts[at.part(p)] = 0.0F;
    return;
  }
  if (threadIdx.x < 2) {
    p.turns[p.rows.index_of(at.block, at.head) * 2 + threadIdx.x] = 0;
  }
  float* const dq = p.rows.dq_of(at.block, at.head);
  const int fours = p.first_stores && at.sees_keys(p) ? 0 : p.rows.sums / 4;
  for (int i = static_cast<int>(threadIdx.x); i < fours; i += kRowThreads) {
    reinterpret_cast<float4*>(dq)[i] = float4{0.0F, 0.0F, 0.0F, 0.0F};
  }
  float* const statistics = p.rows.statistics_of(at.block, at.head);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float sink = 0.0F;
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < p.rows.blocks.block_m; r += kAtOnce) {
    const int query = at.first_query + r;
    const bool exists = query < at.sequence.seqlen_q;
    float sum = 0.0F;
    if (exists) {
      const auto* o = static_cast<const std::uint16_t*>(p.o.data) + at.offset(p.o.strides, query);
      const auto* dout =
          static_cast<const std::uint16_t*>(p.dout.data) + at.offset(p.dout.strides, query);
      for (int c = lane * 8; c < p.head_dim_v; c += kLanes * 8) {
        sum += dot8<kType>(o + c, dout + c, p.head_dim_v - c, p.aligned);
      }
    }
#pragma unroll
    for (int i = 1; i < kLanes; i *= 2) sum += __shfl_xor_sync(~0U, sum, i);
    if (lane != 0) continue;
    float shift = core::kInfinity;
    if (exists) {
      const std::int64_t row = at.sequence.lse_index(p.lse_head, p.heads, at.head, query);
      shift = core::backward_shift(p.softmax_lse[row]);
      if (p.dsoftmax_lse != nullptr) sum -= p.dsoftmax_lse[row];
      if (p.sink_parts != nullptr) sink -= ptx::ex2(p.sink[at.head] * core::kLog2e - shift) * sum;
    }
    statistics[r] = shift;
    statistics[p.rows.blocks.block_m + r] = sum;
  }
  if (p.sink_parts != nullptr) {
    sink = sum_over_block(sink);
    if (threadIdx.x == 0) p.sink_parts[at.part(p)] = sink;
  }
}

/// dSink of the head blockIdx.x.
__device__ __forceinline__ void sum_sinks(const BackwardRowParams& p) {
  const std::int64_t count = std::int64_t{p.batch} * p.rows.blocks.per_sequence;
  const float* const parts = p.sink_parts + blockIdx.x * count;
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < count; i += kRowThreads) sum += parts[i];
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) p.dsink[blockIdx.x] = sum;
}

/// Calls f(index, elements from dbias) for every element.
template <class F>
__device__ __forceinline__ void each_element(const BackwardBiasParams& p, const F& f) {
  const std::int64_t step = std::int64_t{gridDim.x} * kRowThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < p.count();
       i += step) {
    std::int64_t rest = i, at = 0;
    for (int axis = 3; axis >= 0; --axis) {
      at += rest % p.sizes[axis] * p.strides[axis];
      rest /= p.sizes[axis];
    }
    f(i, at);
  }
}

/// Before the main kernel: 0 where it adds, or where it does not come because a mask hides the
/// pair.
__device__ __forceinline__ void begin_bias(const BackwardBiasParams& p) {
  each_element(p, [&](std::int64_t index, std::int64_t at) {
    if (p.sums != nullptr) {
      p.sums[index] = 0.0F;
    } else {
      store_float(p.dbias, p.dtype, at, 0.0F);
    }
  });
}

/// After it: the sums, in the gradient's type.
__device__ __forceinline__ void finish_bias(const BackwardBiasParams& p) {
  each_element(p, [&](std::int64_t index, std::int64_t at) {
    store_float(p.dbias, p.dtype, at, p.sums[index]);
  });
}

}  // namespace tessera::cuda::aux
