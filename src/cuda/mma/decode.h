// Decoding: few query rows against many keys, at the speed of memory (FlashDecoding: Dao, Haziza,
// Massa, Sizov 2023). All query heads of a group and their queries share one axis of rows
// (core::Rows), 16 of them a block, so a key/value head is read once. A block owns one split of the
// keys; its warps take tiles of 16 keys in turn, each with a ring, a softmax and an output of its
// own, and meet only at the end. Parts of several splits are merged by the kernel `combine`.
//
// Any GPU with cp.async, ldmatrix and mma.sync.
#pragma once

#include "core/softmax.h"
#include "core/storage.h"
#include "cuda/mma/decode_params.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/extras.h"
#include "cuda/tile/softcap.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class Decoder {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kRows = K.block_m, kWarps = decode_warps(K), kStages = decode_stages(K);
  static constexpr int kChunks = core::ceil_div(K.head_dim, kColumns);
  static constexpr int kChunksV = core::ceil_div(K.head_dim_v, kColumns);
  static constexpr int kKeyBytes = chunk_bytes(K.head_dim), kValueBytes = chunk_bytes(K.head_dim_v);
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  /// Rows of outputs that warps leave for each other are so far apart that columns of neighbouring
  /// rows are in different banks.
  static constexpr int kPitch = K.head_dim_v + 4;
  static_assert(kRows == 16 && kWarps * kRows * (kPitch + 2) * 4 <= decode_ring_bytes(K));
  static_assert(kTileKeys * 8 % 32 == 0 && (kChunks & (kChunks - 1)) == 0);

 public:
  __device__ __forceinline__ Decoder(const DecodeParams& params, char* shared)
      : p(params),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        queries_((ptx::shared_address(shared) + 127) / 128 * 128),
        ring_(queries_ + kKeyBytes + warp_ * kStages * kStageBytes),
        exchange_(reinterpret_cast<float*>(shared +
                                           (queries_ + kKeyBytes - ptx::shared_address(shared)))),
        w_(1.0F) {}

  __device__ __forceinline__ void run() {
    work_ = p.work.at(static_cast<int>(blockIdx.x));
    sequence_ = p.sequences.at(work_.batch);
    rows_ = {sequence_.seqlen_q, p.group};
    first_row_ = work_.block * kRows;
    count_ = core::min(kRows, static_cast<int>(rows_.count()) - first_row_);
    if (count_ <= 0) return;
    band_ = p.window.band_of(sequence_);
    queries_seen_ = rows_.queries_of(first_row_, first_row_ + count_);
    keys_ = core::split_keys(band_.keys_of(queries_seen_), work_.split, p.split_n);
    for (int half = 0; half < 2; ++half) {
      query_[half] = rows_.query_of(first_row_ + core::min(row_of(half), count_ - 1));
    }
    const int tiles = core::ceil_div(keys_.size(), kTileKeys);
    load_queries();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load(warp_ + i * kWarps, tiles, i);
    // The queries were in the first group.
    ptx::copy_wait<kStages - 2>();
    __syncthreads();
    hold_queries();
    w_.reset();
#pragma unroll
    for (float& x : o_) x = 0.0F;
    int stage = 0;
#pragma unroll 1
    for (int tile = warp_; tile < tiles; tile += kWarps) {
      ptx::copy_wait<kStages - 2>();
      __syncwarp();
      attend(tile, stage);
      __syncwarp();
      load(tile + (kStages - 1) * kWarps, tiles, stage == 0 ? kStages - 1 : stage - 1);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    ptx::copy_wait<0>();
    __syncthreads();
    merge();
  }

 private:
  /// Of the block, the lane's half-th row (of two).
  __device__ __forceinline__ int row_of(int half) const { return lane_ / 4 + 8 * half; }

  // ---- loads ----

  /// Shared address of a 16-byte unit of a row, in chunks of 64 columns, swizzled.
  __device__ __forceinline__ static std::uint32_t place(int row, int unit) {
    return unit / 8 * (kTileKeys * 128) + row * 128 + (unit % 8 ^ row % 8) * 16;
  }
  /// Where the i-th two units after those at `first` are, a multiple of two units from a row's
  /// start.
  __device__ __forceinline__ static std::uint32_t columns(std::uint32_t first, int i) {
    return (first ^ i % 4 * 32) + i / 4 * (kTileKeys * 128);
  }

  /// Queries of all rows, and zeros. A part of the first group of copies.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kUnits = kChunks * 8;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kUnits; i += kWarps * 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const bool exists = row < count_ && unit * 8 < p.head_dim;
      const int of = first_row_ + (exists ? row : 0);
      const int head = work_.head * p.group + rows_.member_of(of);
      const auto* const from = static_cast<const std::uint16_t*>(p.q.data) +
                               sequence_.query_offset(p.q.strides, rows_.query_of(of), head) +
                               (exists ? unit * 8 : 0);
      ptx::copy_async(queries_ + place(row, unit), from, exists);
    }
  }

  /// A tile of keys and values; a group of copies, empty beyond the last tile.
  __device__ __forceinline__ void load(int tile, int tiles, int stage) const {
    if (tile < tiles) {
      const std::uint32_t to = ring_ + stage * kStageBytes;
      const int first = keys_.begin + tile * kTileKeys;
      load_rows<kChunks>(to, p.k, p.head_dim, first);
      load_rows<kChunksV>(to + kKeyBytes, p.v, p.head_dim_v, first);
    }
    ptx::copy_commit();
  }
  template <int kRowChunks>
  __device__ __forceinline__ void load_rows(std::uint32_t to, const Source& source, int dim,
                                            int first) const {
    constexpr int kUnits = kRowChunks * 8;
    constexpr int kAtOnce = kUnits <= 32 ? 32 / kUnits : 1;  // rows that a warp copies together
    static_assert(kUnits <= 32);
    const int unit = lane_ % kUnits, row = lane_ / kUnits;
    const bool in_row = unit * 8 < dim;
    const auto* from = static_cast<const std::uint16_t*>(source.data) +
                       sequence_.key_offset(source.strides, first + row, work_.head) +
                       (in_row ? unit * 8 : 0);
    const int left = keys_.end - first - row;
    to += place(row, unit);
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kAtOnce) {
      const bool exists = in_row && i < left;
      // A row that does not exist is not read, but its address must be one.
      ptx::copy_async((to ^ i % 8 * 16) + i * 128, exists ? from : source.data, exists);
      from += kAtOnce * source.strides.seqlen;
    }
  }

  // ---- a tile of keys ----

  __device__ __forceinline__ void hold_queries() {
    if constexpr (kHolds) {
#pragma unroll
      for (int i = 0; i < K.head_dim / 16; ++i) read_queries(i, held_ + 4 * i);
    }
  }
  /// The i-th 16 columns of all rows as the A operand.
  __device__ __forceinline__ void read_queries(int i, std::uint32_t* words) const {
    ptx::load_matrices(words, columns(queries_ + place(lane_ % 16, lane_ / 16), i));
  }

  __device__ __forceinline__ void attend(int tile, int stage) {
    const std::uint32_t keys = ring_ + stage * kStageBytes, values = keys + kKeyBytes;
    multiply_keys(keys);
    transform(tile);
    w_.weigh_at_once([this] {
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] *= w_.factor[i / 2 % 2];
    });
    multiply_values(values);
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(std::uint32_t keys) {
#pragma unroll
    for (float& x : w_.s) x = 0.0F;
    keys += place(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int i = 0; i < K.head_dim / 16; ++i) {
      std::uint32_t b[4], a[4];
      ptx::load_matrices(b, columns(keys, i));
      const std::uint32_t* queries = a;
      if constexpr (kHolds) {
        queries = held_ + 4 * i;
      } else {
        read_queries(i, a);
      }
      ptx::mma<kType>(w_.s, queries, b[0], b[1]);
      ptx::mma<kType>(w_.s + 4, queries, b[2], b[3]);
    }
  }

  /// Products become base-2 scores (S1), the mask last.
  __device__ __forceinline__ void transform(int tile) {
    if (p.score.capped) {
#pragma unroll
      for (float& x : w_.s) x = capped_tanh(p.score.pre, x) * p.score.post;
    } else {
#pragma unroll
      for (float& x : w_.s) x *= p.score.pre;
    }
    const int first = keys_.begin + tile * kTileKeys;
    if (p.extras.any()) add_row_extras(first + lane_ % 4 * 2);
    const core::Range here = {first, first + kTileKeys};
    if (here.end > keys_.end || band_.cover(queries_seen_, here) != core::Cover::full) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const core::Range seen = core::intersect(band_.keys_of(query_[half]), keys_);
        const int lane_first = first + lane_ % 4 * 2;
        mask_row(w_.s, half, {seen.begin - lane_first, seen.end - lane_first}, -core::kInfinity);
      }
    }
  }
  /// The lane's two rows belong to any two queries and heads.
  __device__ __forceinline__ void add_row_extras(int first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row_ + core::min(row_of(half), count_ - 1);
      const ScorePlace at = {work_.batch,        work_.head * p.group + rows_.member_of(row),
                             query_[half],       first_key,
                             sequence_.seqlen_q, sequence_.seqlen_k};
      add_extras_of_row(p.extras, at, half, w_.s);
    }
  }

  /// O += P V.
  __device__ __forceinline__ void multiply_values(std::uint32_t values) {
    values += place(lane_ % 16, lane_ / 16);
#pragma unroll
    for (int i = 0; i < K.head_dim_v / 16; ++i) {
      std::uint32_t b[4];
      ptx::load_matrices_across(b, columns(values, i));
      ptx::mma<kType>(o_ + 8 * i, w_.operand, b[0], b[1]);
      ptx::mma<kType>(o_ + 8 * i + 4, w_.operand, b[2], b[3]);
    }
  }

  // ---- results ----

  /// Outputs and states of all warps, in their order, become the block's; written, or left as a
  /// part.
  __device__ __forceinline__ void merge() {
    float* const outputs = exchange_;
    float* const states = exchange_ + kWarps * kRows * kPitch;  // [warp][row][2]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w_.sum[half];
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      const int row = warp_ * kRows + row_of(half);
      if (lane_ % 4 == 0) {
        states[2 * row] = w_.reference[half];
        states[2 * row + 1] = sum;
      }
      float* const to = outputs + row * kPitch + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 8; ++i) {
        to[8 * i] = o_[4 * i + 2 * half];
        to[8 * i + 1] = o_[4 * i + 2 * half + 1];
      }
    }
    __syncthreads();
    constexpr int kThreadsOfRow = kWarps * 32 / kRows;
    const int row = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    if (row >= count_) return;
    const int query = rows_.query_of(first_row_ + row);
    const int head = work_.head * p.group + rows_.member_of(first_row_ + row);
    const bool whole = p.work.splits <= 1;
    core::Softmax<float> merged;
    for (int w = 0; w < kWarps; ++w) merged = core::combine(merged, state_of(states, w, row));
    // A row's sink enters with its first split.
    const bool has_sink = p.sink != nullptr && work_.split == 0;
    const core::FinishedRow<float> end =
        core::finish(merged, has_sink, has_sink ? p.sink[head] : 0.0F);
    float scale[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      scale[w] = ptx::ex2(state_of(states, w, row).max - core::shift_of(merged.max)) * end.factor;
    }
    const float lse = core::lse_of(end.state);
    const int part = static_cast<int>(threadIdx.x) % kThreadsOfRow;
    const std::int64_t part_row =
        work_.split * p.part_rows + p.sequences.row_of(sequence_, query) * p.num_heads + head;
    if (part == 0) {
      if (!whole) {
        p.part_lse[part_row] = lse;
      } else if (p.softmax_lse != nullptr) {
        p.softmax_lse[sequence_.lse_index(p.lse_head, p.num_heads, head, query)] = lse;
      }
    }
    auto* const to = static_cast<std::uint16_t*>(p.o) +
                     (whole ? sequence_.query_offset(p.o_strides, query, head) : 0);
    for (int column = part * 4; column < p.head_dim_v; column += kThreadsOfRow * 4) {
      float x[4] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 y =
            *reinterpret_cast<const float4*>(outputs + (w * kRows + row) * kPitch + column);
        x[0] = fmaf(y.x, scale[w], x[0]);
        x[1] = fmaf(y.y, scale[w], x[1]);
        x[2] = fmaf(y.z, scale[w], x[2]);
        x[3] = fmaf(y.w, scale[w], x[3]);
      }
      if (whole) {
        ptx::store_if(true, to + column, ptx::pack<kType>(x[0], x[1]),
                      ptx::pack<kType>(x[2], x[3]));
      } else {
        *reinterpret_cast<float4*>(p.part_o + part_row * p.head_dim_v + column) =
            float4{x[0], x[1], x[2], x[3]};
      }
    }
  }
  __device__ __forceinline__ static core::Softmax<float> state_of(const float* states, int warp,
                                                                  int row) {
    const float* const at = states + 2 * (warp * kRows + row);
    return {at[0], at[1]};
  }

  static constexpr bool kHolds = K.head_dim <= 128;  ///< queries in registers

  const DecodeParams& p;
  const int warp_, lane_;
  const std::uint32_t queries_;  ///< shared address
  const std::uint32_t ring_;     ///< the warp's
  float* const exchange_;
  core::Work work_;
  core::Sequence sequence_;
  core::Rows rows_;
  core::Band band_;
  core::Range queries_seen_, keys_;
  int first_row_ = 0, count_ = 0;  ///< rows of the block
  int query_[2];                   ///< of the lane's rows
  std::uint32_t held_[kHolds ? K.head_dim / 4 : 1];
  Weights<kType, kTileKeys> w_;
  float o_[K.head_dim_v / 2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void decode(const DecodeParams& p, char* shared) {
  Decoder<K>(p, shared).run();
}

}  // namespace tessera::cuda::mma
