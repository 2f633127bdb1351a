// What becomes of a decoding block's results: its warps' outputs are merged; where the item has no
// other part they are the result, otherwise they are left for the block that has the item's first
// part, which merges all parts, in their order, as soon as they are there.
#pragma once

#include "core/softmax.h"
#include "cuda/mma/decode_walk.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class DecodeResults {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kRows = K.block_m, kWarps = decode_warps(K), kThreads = decode_threads(K);
  /// Rows of outputs that warps leave for each other are so far apart that columns of neighbouring
  /// rows are in different banks.
  static constexpr int kPitch = K.head_dim_v + 4;
  static constexpr int kInFlight = 8;  ///< parts whose loads are under way

 public:
  /// Of shared memory: outputs and states of all warps.
  static constexpr int kFloats = kWarps * kRows * (kPitch + 2);

  __device__ __forceinline__ DecodeResults(const DecodeParams& params, const DecodeWalk<K>& walk,
                                           float* shared)
      : p(params),
        walk_(walk),
        outputs_(shared),
        states_(shared + kWarps * kRows * kPitch),
        count_(core::min(kRows, static_cast<int>(walk.item.rows.count()))) {
    // As many threads a row as there are for a power of two of rows.
    int rows = 1;
    while (rows < count_) rows *= 2;
    threads_ = kThreads / rows;
    row_ = static_cast<int>(threadIdx.x) / threads_;
    thread_ = static_cast<int>(threadIdx.x) % threads_;
  }

  /// All threads; nobody reads the ring any more. `unit` is the part's first.
  __device__ __forceinline__ void write_part(int unit, const Weights<kType, kTileKeys>& w,
                                             const float (&o)[K.head_dim_v / 2]) const {
    leave(w, o);
    __syncthreads();
    const bool whole = parts() == 1;
    const int slot = whole ? 0 : slot_of(part_of(unit));
    if (row_ < count_) merge_warps(whole, slot, unit == 0);
    __syncthreads();
    if (!whole && !merges() && threadIdx.x == 0) announce(slot);
  }

  /// Once the block has written its parts of an item.
  __device__ __forceinline__ void merge_parts() const {
    const int n = parts();
    if (n == 1 || !merges()) return;
    const int own = p.parts.by_unit ? walk_.units.end : 1;
    for (int part = own + static_cast<int>(threadIdx.x); part < n; part += kThreads) {
      std::int32_t* const ready = p.parts.ready + slot_of(part);
      while (ptx::load_acquire(ready) != p.parts.ticket) ptx::sleep(20);
      *ready = 0;
    }
    __syncthreads();
    // Lanes meet in shuffles, with a row or without.
    add_up(n);
  }

 private:
  // ---- parts and their slots ----

  __device__ __forceinline__ int parts() const {
    const core::SpanItem& item = walk_.item.place;
    if (p.parts.by_unit) return item.units;
    return walk_.spans.span_of(item, item.units - 1) - walk_.spans.span_of(item, 0) + 1;
  }
  __device__ __forceinline__ int part_of(int unit) const {
    if (p.parts.by_unit) return unit;
    return walk_.span - walk_.spans.span_of(walk_.item.place, 0);
  }
  /// Has the block the first part?
  __device__ __forceinline__ bool merges() const { return walk_.units.begin == 0; }
  __device__ __forceinline__ int slot_of(int part) const {
    const DecodeItem& item = walk_.item;
    if (p.parts.by_unit) {
      return (item.sequence.batch * p.heads + item.head) * p.parts.units + part;
    }
    const int first = walk_.spans.span_of(item.place, 0);
    return part == 0 ? walk_.spans.count + first : first + part;
  }
  __device__ __forceinline__ void announce(int slot) const {
    __threadfence();
    ptx::store_release(p.parts.ready + slot, p.parts.ticket);
  }

  // ---- the block's warps ----

  /// Outputs and states of the warp.
  __device__ __forceinline__ void leave(const Weights<kType, kTileKeys>& w,
                                        const float (&o)[K.head_dim_v / 2]) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w.sum[half];
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      const int row = warp * kRows + lane / 4 + 8 * half;
      if (lane % 4 == 0) {
        states_[2 * row] = w.reference[half];
        states_[2 * row + 1] = sum;
      }
      float* const to = outputs_ + row * kPitch + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 8; ++i) {
        to[8 * i] = o[4 * i + 2 * half];
        to[8 * i + 1] = o[4 * i + 2 * half + 1];
      }
    }
  }
  __device__ __forceinline__ core::Softmax<float> state_of(int warp) const {
    const float* const at = states_ + 2 * (warp * kRows + row_);
    return {at[0], at[1]};
  }

  /// They become the result of the thread's row, or a part of it.
  __device__ __forceinline__ void merge_warps(bool whole, int slot, bool first) const {
    core::Softmax<float> merged;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) merged = core::combine(merged, state_of(w));
    // A row's sink enters with its first part.
    const bool has_sink = p.sink != nullptr && first;
    const core::FinishedRow<float> end =
        core::finish(merged, has_sink, has_sink ? p.sink[head()] : 0.0F);
    float scale[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      scale[w] = ptx::ex2(state_of(w).max - core::shift_of(merged.max)) * end.factor;
    }
    const std::int64_t at = std::int64_t{slot} * kRows + row_;
    if (thread_ == 0) {
      if (whole) {
        write_lse(core::lse_of(end.state));
      } else {
        p.parts.lse[at] = core::lse_of(end.state);
      }
    }
#pragma unroll 1
    for (int column = thread_ * 4; column < p.head_dim_v; column += threads_ * 4) {
      float x[4] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 y =
            *reinterpret_cast<const float4*>(outputs_ + (w * kRows + row_) * kPitch + column);
        add(x, y, scale[w]);
      }
      if (whole) {
        write(column, x);
      } else {
        *reinterpret_cast<float4*>(p.parts.o + at * p.head_dim_v + column) =
            float4{x[0], x[1], x[2], x[3]};
      }
    }
  }

  // ---- all parts of an item ----

  __device__ __forceinline__ core::Softmax<float> part_state(int part) const {
    return core::from_lse(p.parts.lse[std::int64_t{slot_of(part)} * kRows + row_]);
  }

  /// The row's result, from its parts in their order.
  __device__ __forceinline__ void add_up(int n) const {
    const int lanes = core::min(threads_, 32), lane = thread_ % lanes;
    const bool exists = row_ < count_;
    core::Softmax<float> merged;
    for (int part = lane; exists && part < n; part += lanes) {
      merged = core::combine(merged, part_state(part));
    }
#pragma unroll 1
    for (int i = 1; i < lanes; i *= 2) {
      const core::Softmax<float> other = {__shfl_xor_sync(~0U, merged.max, i),
                                          __shfl_xor_sync(~0U, merged.sum, i)};
      const bool before = (lane & i) == 0;
      merged = core::combine(before ? merged : other, before ? other : merged);
    }
    if (!exists) return;
    if (thread_ == 0) write_lse(core::lse_of(merged));
#pragma unroll 1
    for (int column = thread_ * 4; column < p.head_dim_v; column += threads_ * 4) {
      float x[4] = {};
#pragma unroll 1
      for (int part = 0; part < n; part += kInFlight) add_parts(part, n, column, merged, x);
      write(column, x);
    }
  }
  /// Four columns of some parts.
  __device__ __forceinline__ void add_parts(int part, int n, int column,
                                            const core::Softmax<float>& merged,
                                            float (&x)[4]) const {
    float4 y[kInFlight];
    float weight[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int at = core::min(part + i, n - 1);
      const std::int64_t row = std::int64_t{slot_of(at)} * kRows + row_;
      y[i] = *reinterpret_cast<const float4*>(p.parts.o + row * p.head_dim_v + column);
      weight[i] = part + i < n ? core::weight_of(part_state(at), merged) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) add(x, y[i], weight[i]);
  }

  // ---- results ----

  __device__ __forceinline__ static void add(float (&x)[4], const float4& y, float weight) {
    x[0] = fmaf(y.x, weight, x[0]);
    x[1] = fmaf(y.y, weight, x[1]);
    x[2] = fmaf(y.z, weight, x[2]);
    x[3] = fmaf(y.w, weight, x[3]);
  }
  __device__ __forceinline__ int query() const { return walk_.item.rows.query_of(row_); }
  __device__ __forceinline__ int head() const {
    return walk_.item.head * p.group + walk_.item.rows.member_of(row_);
  }
  __device__ __forceinline__ void write_lse(float lse) const {
    if (p.softmax_lse == nullptr) return;
    p.softmax_lse[walk_.item.sequence.lse_index(p.lse_head, p.num_heads, head(), query())] = lse;
  }
  __device__ __forceinline__ void write(int column, const float (&x)[4]) const {
    auto* const to = static_cast<std::uint16_t*>(p.o) +
                     walk_.item.sequence.query_offset(p.o_strides, query(), head()) + column;
    ptx::store_if(true, to, ptx::pack<kType>(x[0], x[1]), ptx::pack<kType>(x[2], x[3]));
  }

  const DecodeParams& p;
  const DecodeWalk<K>& walk_;
  float* const outputs_;  ///< [warps][rows][kPitch]
  float* const states_;   ///< [warps][rows][2]
  const int count_;       ///< rows that exist
  int threads_;           ///< of a row: neighbours
  int row_, thread_;      ///< the thread's row, and which of the row's it is
};

}  // namespace tessera::cuda::mma
