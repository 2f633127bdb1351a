// What becomes of a decoding block's results: its warps' outputs are merged; where the item has no
// other part they are the result, otherwise they are left for the block that has the item's first
// part, which merges all parts, in their order, as soon as they are there.
#pragma once

#include "core/softmax.h"
#include "cuda/mma/decode_walk.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::mma {

/// What a block's warps tell each other of a piece.
template <core::Kernel K>
struct DecodeExchange {
  const float* outputs[decode_warps(K)];  ///< [rows][swizzled columns], a warp's
  core::Softmax<float> state[decode_warps(K)][K.block_m];
  float lse[K.block_m];  ///< of the block's part
};

template <core::Kernel K>
class DecodeResults {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kRows = K.block_m, kWarps = decode_warps(K), kThreads = decode_threads(K);
  static constexpr int kPart = kRows * K.head_dim_v;  ///< elements
  static constexpr int kAsked = 4;                    ///< parts that a lane asks for at once
  static constexpr int kMostParts = 256;              ///< whose weights are in shared memory
  static constexpr int kWeightBytes = kRows * kMostParts * 4;
  static constexpr int kPartBytes = decode_ring_bytes(K) - kWeightBytes;
  static_assert((kThreads & (kThreads - 1)) == 0);

 public:
  /// piece: of this warp; its numbers are all warps'.
  __device__ __forceinline__ DecodeResults(const DecodeParams& params, const DecodeWalk<K>& walk,
                                           const DecodePiece& piece, DecodeExchange<K>& exchange)
      : p(params), walk_(walk), piece_(piece), exchange_(exchange), count_(piece.rows) {
    // As many threads a row as there are for a power of two of rows.
    const int shift = count_ > 1 ? 32 - __clz(count_ - 1) : 0;
    threads_ = kThreads >> shift;
    thread_ = static_cast<int>(threadIdx.x) & (threads_ - 1);
    row_ = static_cast<int>(threadIdx.x) >> (31 - __clz(threads_));
    const DecodeRow row = row_of(piece, p.group, row_);
    query_ = row.query;
    head_ = piece.head * p.group.value() + row.member;
  }

  /// The warp's output and state, into its free stage of the ring.
  __device__ __forceinline__ void leave(const Weights<kType, kTileKeys>& w,
                                        const float (&o)[K.head_dim_v / 2], float* outputs) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) exchange_.outputs[warp] = outputs;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w.sum[half];
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      const int row = lane / 4 + 8 * half;
      if (row >= count_) continue;
      if (lane % 4 == 0) exchange_.state[warp][row] = {w.reference[half], sum};
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 8; ++i) {
        *reinterpret_cast<float2*>(outputs + place(row, 8 * i + lane % 4 * 2)) =
            float2{o[4 * i + 2 * half], o[4 * i + 2 * half + 1]};
      }
    }
  }

  /// All warps have left theirs. The result, or a part of it.
  __device__ __forceinline__ void merge_warps() const {
    if (row_ >= count_) return;
    core::Softmax<float> state[kWarps], merged;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) state[w] = exchange_.state[w][row_];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) merged = core::combine(merged, state[w]);
    // A row's sink enters with its first part.
    const bool has_sink = p.sink != nullptr && piece_.units.begin == 0;
    const core::FinishedRow<float> end =
        core::finish(merged, has_sink, has_sink ? p.sink[head_] : 0.0F);
    float scale[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      scale[w] = ptx::ex2(state[w].max - core::shift_of(merged.max)) * end.factor;
    }
#pragma unroll 1
    for (int column = thread_ * 4; column < p.head_dim_v; column += threads_ * 4) {
      float x[4] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        add(x, *reinterpret_cast<const float4*>(exchange_.outputs[w] + place(row_, column)),
            scale[w]);
      }
      if (whole()) {
        write(column, x);
      } else {
        *reinterpret_cast<float4*>(part_row(slot()) + column) = float4{x[0], x[1], x[2], x[3]};
      }
    }
    if (thread_ != 0) return;
    const float lse = core::lse_of(end.state);
    if (whole()) {
      write_lse(lse);
    } else {
      exchange_.lse[row_] = lse;
    }
  }

  /// All warps have merged: a part is there, for whoever sees its state.
  __device__ __forceinline__ void announce() const {
    if (whole() || row_ >= count_ || thread_ != 0) return;
    // Cumulative: what the block wrote before its barrier is seen, too.
    ptx::store_release(state_at(slot()),
                       std::uint64_t{p.parts.ticket} << 32 | __float_as_uint(exchange_.lse[row_]));
  }

  /// Does the block merge the item's parts now? The ring is empty then.
  __device__ __forceinline__ bool merges_parts() const {
    return !whole() && first_of_item() && walk_.last_of_item(piece_);
  }
  /// The row's result, from its parts in their order; those of the block itself are announced, too.
  /// Memory answers twice: that all parts are there, and then with as many as the ring holds, while
  /// their weights are made. A thread meets nobody but its row's lanes in its warp. ring: from a
  /// multiple of 16 bytes.
  __device__ __forceinline__ void merge_parts(char* ring) const {
    const int n = p.parts.by_unit ? piece_.item.units
                                  : walk_.spans().span_of(piece_.item, piece_.item.units - 1) -
                                        walk_.span() + 1;
    const int lanes = core::min(threads_, 32), lane = thread_ & (lanes - 1);
    const int held = n <= kMostParts ? n : 0;
    const int last = row_ < count_ ? n : 0;
    float* const weights =
        reinterpret_cast<float*>(ring) + static_cast<int>(threadIdx.x) / lanes * kMostParts;
    float* const rows = reinterpret_cast<float*>(ring + kWeightBytes) + row_ * K.head_dim_v;
    const int fitting = kPartBytes / (K.head_dim_v * 4) / (kThreads / threads_);
    core::Softmax<float> merged;
#pragma unroll 1
    for (int first = lane; first < last; first += kAsked * lanes) {
      std::uint64_t states[kAsked];
#pragma unroll
      for (int i = 0; i < kAsked; ++i) {
        const int part = first + i * lanes;
        if (part < last) states[i] = ptx::load_relaxed(state_at(slot_of(part)));
      }
#pragma unroll
      for (int i = 0; i < kAsked; ++i) {
        const int part = first + i * lanes;
        if (part >= last) break;
        const float lse = await(part, states[i]);
        merged = core::combine(merged, core::from_lse(lse));
        if (part < held) weights[part] = lse;
      }
    }
    ptx::fence_gpu();
    __syncwarp();
    if (n <= fitting) copy_parts(rows, {0, last}, {thread_ * 4, p.head_dim_v});
#pragma unroll 1
    for (int i = 1; i < lanes && i < n; i *= 2) {
      const core::Softmax<float> other = {__shfl_xor_sync(~0U, merged.max, i),
                                          __shfl_xor_sync(~0U, merged.sum, i)};
      const bool before = (lane & i) == 0;
      merged = core::combine(before ? merged : other, before ? other : merged);
    }
    if (last > 0 && thread_ == 0) write_lse(core::lse_of(merged));
#pragma unroll 1
    for (int part = lane; part < core::min(held, last); part += lanes) {
      weights[part] = core::weight_of(core::from_lse(weights[part]), merged);
    }
    __syncwarp();
#pragma unroll 1
    for (int column = thread_ * 4; last > 0 && column < p.head_dim_v; column += threads_ * 4) {
      float x[4] = {};
#pragma unroll 1
      for (int first = 0; first < n; first += fitting) {
        const int end = core::min(first + fitting, n);
        if (n > fitting) copy_parts(rows, {first, end}, {column, column + 1});
        ptx::copy_commit();
        ptx::copy_wait<0>();
#pragma unroll 4
        for (int part = first; part < end; ++part) {
          const float weight =
              held > 0 ? weights[part] : core::weight_of(core::from_lse(lse_of_part(part)), merged);
          add(x, *reinterpret_cast<const float4*>(rows + (part - first) * row_parts() + column),
              weight);
        }
      }
      write(column, x);
    }
    // A replay must not find them.
    __syncthreads();
    for (int part = thread_; part < last; part += threads_) *state_at(slot_of(part)) = 0;
  }

 private:
  // ---- parts and their slots ----

  __device__ __forceinline__ bool first_of_item() const {
    return walk_.spans().units_of(piece_.item, walk_.span()).begin == 0;
  }
  /// Has the item no other part?
  __device__ __forceinline__ bool whole() const {
    return piece_.units.begin == 0 && piece_.units.end == piece_.item.units;
  }
  /// Of a part of an item that the block has the first part of.
  __device__ __forceinline__ int slot_of(int part) const {
    if (p.parts.by_unit) return first_slot() + part;
    return part == 0 ? walk_.spans().count + walk_.span() : walk_.span() + part;
  }
  /// Of the block's part.
  __device__ __forceinline__ int slot() const {
    if (p.parts.by_unit) return first_slot() + piece_.units.begin;
    return piece_.units.begin == 0 ? walk_.spans().count + walk_.span() : walk_.span();
  }
  __device__ __forceinline__ int first_slot() const {
    const int head = piece_.sequence.batch * p.heads + piece_.head;
    return (head * p.parts.blocks + piece_.block) * p.parts.units;
  }
  __device__ __forceinline__ std::uint64_t* state_at(int slot) const {
    return p.parts.state + std::int64_t{slot} * kRows + row_;
  }
  __device__ __forceinline__ float* part_row(int slot) const {
    return p.parts.o + std::int64_t{slot} * kPart + row_ * K.head_dim_v;
  }
  /// Waits for the row's lse of a part, whose state was read last as this.
  __device__ __forceinline__ float await(int part, std::uint64_t state) const {
    while (state >> 32 != p.parts.ticket) state = ptx::load_relaxed(state_at(slot_of(part)));
    return __uint_as_float(static_cast<std::uint32_t>(state));
  }
  /// The row's lse of a part that is there.
  __device__ __forceinline__ float lse_of_part(int part) const {
    return __uint_as_float(static_cast<std::uint32_t>(*state_at(slot_of(part))));
  }

  /// Elements of shared memory from a part's row to the next part's.
  __device__ __forceinline__ int row_parts() const { return kThreads / threads_ * K.head_dim_v; }
  /// The thread's columns of some parts, to where it alone reads them.
  __device__ __forceinline__ void copy_parts(float* rows, core::Range parts,
                                             core::Range columns) const {
#pragma unroll 1
    for (int column = columns.begin; column < columns.end; column += threads_ * 4) {
      const float* const first = part_row(slot_of(0)) + column;
      // But for the first they lie side by side.
      const float* const others = part_row(slot_of(1)) - kPart + column;
      std::uint32_t to = ptx::shared_address(rows + column);
#pragma unroll 4
      for (int part = parts.begin; part < parts.end; ++part, to += row_parts() * 4) {
        ptx::copy_async(to, part == 0 ? first : others + std::int64_t{part} * kPart, true);
      }
    }
  }

  // ---- rows ----

  /// Of a warp's outputs: columns swizzled, so that neighbouring rows are in different banks.
  __device__ __forceinline__ static int place(int row, int column) {
    return row * K.head_dim_v + (column ^ row % 8 * 4);
  }
  __device__ __forceinline__ static void add(float (&x)[4], const float4& y, float weight) {
    x[0] = fmaf(y.x, weight, x[0]);
    x[1] = fmaf(y.y, weight, x[1]);
    x[2] = fmaf(y.z, weight, x[2]);
    x[3] = fmaf(y.w, weight, x[3]);
  }
  __device__ __forceinline__ void write_lse(float lse) const {
    if (p.softmax_lse == nullptr) return;
    p.softmax_lse[piece_.sequence.lse_index(p.lse_head, p.num_heads, head_, query_)] = lse;
  }
  __device__ __forceinline__ void write(int column, const float (&x)[4]) const {
    auto* const to = static_cast<std::uint16_t*>(p.o) +
                     piece_.sequence.query_offset(p.o_strides, query_, head_) + column;
    ptx::store_if(true, to, ptx::pack<kType>(x[0], x[1]), ptx::pack<kType>(x[2], x[3]));
  }

  const DecodeParams& p;
  const DecodeWalk<K>& walk_;
  const DecodePiece& piece_;
  DecodeExchange<K>& exchange_;
  const int count_;   ///< rows that exist
  int threads_;       ///< of a row: neighbours
  int row_, thread_;  ///< the thread's row, and which of the row's it is
  int query_, head_;  ///< of the row
};

}  // namespace tessera::cuda::mma
