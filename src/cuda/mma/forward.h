// The forward pass by mma.sync: FlashAttention-2's loop (Dao 2023, section 3), with two buffers of
// keys and of values where they fit, so that a block of one comes while the other is multiplied.
//
// A warp has tile_m query rows, 32 where two tiles of 16 share what ldmatrix brings, and all warps
// of a block share its keys. Of wide values several warps share rows (shared_rows.h). A block of
// threads takes one tile of query rows after another. Of a tile's blocks of keys, from the right
// (the diagonal) to the left: S = Q K^T while values come, weights, O += P V while the next keys
// come. Rows past a sequence's end are zeros as they come.
#pragma once

#include "core/mma_shape.h"
#include "core/softmax.h"
#include "core/storage.h"
#include "cuda/mma/forward_loads.h"
#include "cuda/mma/forward_params.h"
#include "cuda/mma/shared_rows.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/dropout.h"
#include "cuda/tile/extras.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class Forward {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kN = K.block_n, kRows = K.tile_m;
  static constexpr int kD = K.head_dim, kDv = K.head_dim_v;
  static constexpr int kGroups = kRows / 16;  ///< of 16 rows of a warp
  /// Warps that share rows, each with the scores of some keys and the outputs of some columns.
  static constexpr int kParts = core::mma_parts(K);
  static constexpr int kKeys = kN / kParts, kColumns = kDv / kParts;
  static constexpr int kStages = K.stages;
  static constexpr int kQBytes = core::mma_query_bytes(K), kKBytes = core::mma_key_bytes(K),
                       kVBytes = core::mma_value_bytes(K);
  /// Whether warps keep their queries in registers, and so look where their rows' diagonal ends.
  static constexpr bool kSpares = core::mma_keeps_queries(K);
  static_assert(K.block_m % kRows == 0 && kRows % 16 == 0);
  static constexpr bool kOverlaps =
      kSpares && kStages == 2 && K.extra == core::Extra::none && !K.any_layout;
  static constexpr bool kAll = K.extra == core::Extra::all;
  static constexpr bool kSoftcap = K.extra == core::Extra::softcap;
  static_assert(kStages == 1 || kStages == 2);
  static_assert(kParts == 1 || (!kSpares && !kSoftcap && kColumns % 64 == 0));

 public:
  using Told = typename SharedRows<K>::Told;

  __device__ __forceinline__ Forward(const ForwardParams& params, std::uint32_t shared,
                                     ForwardTile& tile, Told& told)
      : p(params),
        q_(shared),
        k_(shared + kQBytes),
        v_(k_ + kStages * kKBytes),
        loads_(params, q_, k_, v_, q_ + core::mma_buffer_bytes(K)),
        warp_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32 / kParts, 0)),
        part_(kParts == 1 ? 0 : __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32 % kParts, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        query_(q_ + (warp_ * kRows + lane_ % 16) * 128 + (lane_ / 16 ^ lane_ % 8) * 16),
        key_(k_ + (part_ * kKeys + lane_ / 16 * 8 + lane_ % 8) * 128 +
             (lane_ / 8 % 2 ^ lane_ % 8) * 16),
        shared_(v_ + kStages * kVBytes, told, warp_, part_, lane_),
        tile_(tile) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      w_[g].to_base2 = kAll       ? 1.0F
                       : kSoftcap ? params.score.pre * params.score.post
                                  : params.score.pre;
    }
  }

  __device__ __forceinline__ void run() {
    for (int i = 0;; ++i) {
      const int index =
          core::WorkOrder::index_of(i, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
      if (index >= p.work.count<int>()) return;
      compute(p.work.at(index));
    }
  }

 private:
  // ---- a tile ----

  __device__ __forceinline__ void compute(const core::Work& work) {
    core::Sequence sequence = p.sequences.at(work.batch);
    p.cache.place(sequence);
    const int first_row = work.block * K.block_m;
    const int row_count = sequence.seqlen_q << p.rows.shift;
    if (first_row >= row_count) return;
    const core::Band band = p.window.band_of(sequence);
    const core::Range queries =
        p.rows.queries_of({first_row, core::min(first_row + K.block_m, row_count)});
    const int head_k = work.head / p.group;
    const ForwardTile tile = {.sequence = sequence,
                              .band = band,
                              .blocks = core::key_blocks(band, queries, kN),
                              .first_row = first_row,
                              .head = work.head,
                              .keys = loads_.start_of(p.k, sequence, head_k),
                              .values = loads_.start_of(p.v, sequence, head_k)};
    __syncthreads();  // of the tile before all have read what lay here
    if (threadIdx.x == 0) tile_ = tile;
    if (tile.blocks.seen.empty()) {
      __syncthreads();
      write_zeros();
      return;
    }
    int n = tile.blocks.seen.end - 1;
    loads_.load_queries(tile, row_count);
    loads_.begin(tile, n);
    loads_.load_keys(tile, n);
    ptx::copy_commit();
    loads_.load_values(tile, n);
    ptx::copy_commit();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) w_[g].reset();
#pragma unroll
    for (int i = 0; i < kGroups * kColumns / 2; ++i) {
      o_[i / (kColumns / 2)][i % (kColumns / 2)] = 0.0F;
    }
    if constexpr (kSpares) {
      own_end_ = end_of_warp(band, first_row, row_count);
      ptx::copy_wait<1>();
      __syncthreads();
      hold_queries();
    }
#pragma unroll 1
    for (; n >= tile.blocks.seen.begin; --n) step(n);
    write();
  }

  /// Keys of block n are the older of two groups of copies under way, its values the newer one.
  __device__ __forceinline__ void step(int n) {
    ptx::copy_wait<1>();
    __syncthreads();
    const bool last = n == tile_.blocks.seen.begin;
    if (!last && kStages > 1) loads_.load_keys(tile_, n - 1);
    ptx::copy_commit();
    const bool sees = !kSpares || agreed(n < own_end_);
    const bool masked = agreed(sees && (n >= tile_.blocks.full.end || n < tile_.blocks.full.begin));
    if constexpr (kOverlaps) {
      step_overlapped(n, last, sees, masked);
      return;
    }
    if (sees) multiply_keys(n);
    if constexpr (kAll) {
      if (sees) transform(n);
    }
    Uncapped raw[kGroups];
    if constexpr (kSoftcap) {
      float top[2];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) raw[g] = cap(p.score, p.series, w_[g].s, top);
    }
    if (masked) mask(n);
    meet_values(n, last);
    if constexpr (kParts > 1) {
      weigh_together(n);
      multiply_values(n);
    } else if (sees) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) weigh(g, n, raw[g]);
      multiply_values(n);
    }
    if constexpr (kStages == 1) {
      __syncthreads();
      if (!last) loads_.load_values(tile_, n - 1);
      ptx::copy_commit();
    }
  }

  /// The block's values are there, and nobody reads its keys any more.
  __device__ __forceinline__ void meet_values(int n, bool last) {
    ptx::copy_wait<1>();
    __syncthreads();
    if (!last && kStages == 1) loads_.load_keys(tile_, n - 1);
    if (!last && kStages > 1) loads_.load_values(tile_, n - 1);
    ptx::copy_commit();
  }

  // Of a step without a mask half of the keys are weighed between the products of the other half.

  __device__ __forceinline__ void step_overlapped(int n, bool last, bool sees, bool masked) {
    bool overlaps = sees && !masked;
    Pending pending[kGroups];
    if (overlaps) {
      overlaps = multiply_and_weigh_half(n, pending);
    } else if (sees) {
      multiply_keys(n);
      if (masked) mask(n);
    }
    meet_values(n, last);
    if (overlaps) {
      weigh_half_and_multiply(n, pending);
    } else if (sees) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) weigh(g, n, {});
      multiply_values(n);
    }
  }

  using Pending = typename Weights<kType, kKeys>::Pending;
  static constexpr int kHalf = kN / 4;  ///< scores of a thread and row group

  /// Of the pairs of scores from `from` on those that are weighed after a slot's products.
  __device__ __forceinline__ void weigh_some(Pending (&pending)[kGroups], int slot, int from) {
    constexpr int kPairs = core::ceil_div(kHalf / 2, kD / 16 * kN / 32);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int at = 2 * (slot * kPairs + i);
        if (at < kHalf) w_[g].weigh_pair(pending[g], from + at);
      }
    }
  }
  __device__ __forceinline__ static bool any_too_large(const Pending (&pending)[kGroups]) {
    bool large = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) large |= pending[g].too_large();
    return agreed(large);
  }
  /// S, and weights of the left half of the keys; false: they are too large, and not made.
  __device__ __forceinline__ bool multiply_and_weigh_half(int n, Pending (&pending)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pending[g] = w_[g].begin();
    clear_scores();
    multiply_keys<0, kN / 32>(n, [](int) {});
    multiply_keys<kN / 32, kN / 16>(n, [&](int slot) { weigh_some(pending, slot, 0); });
    return !any_too_large(pending);
  }
  /// The rest: weights of the right half, and O += P V.
  __device__ __forceinline__ void weigh_half_and_multiply(int n, Pending (&pending)[kGroups]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      w_[g].keep(pending[g]);
      pending[g] = w_[g].begin();
    }
    multiply_values<0, kN / 32>(n, [&](int slot) { weigh_some(pending, slot, kHalf); });
    if (any_too_large(pending)) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        w_[g].template weigh_at_once<kHalf, kN / 2>([&] { rescale(g); },
                                                    [](float weight, int) { return weight; });
      }
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) w_[g].keep(pending[g]);
    }
    multiply_values<kN / 32, kN / 16>(n, [](int) {});
  }

  // ---- scores to weights ----

  /// O of the warp's g-th 16 rows follows their reference.
  __device__ __forceinline__ void rescale(int g) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o_[g][i] *= w_[g].factor[i / 2 % 2];
  }
  /// Of the warp's g-th 16 rows: S becomes the operand of the next product.
  __device__ __forceinline__ void weigh(int g, int n, Uncapped raw) {
    if constexpr (kAll || kSoftcap) {
      float top[2];
      greatest_or_zero(w_[g].s, top);
      if (w_[g].soften(top, raw, p.series)) rescale(g);
      if constexpr (kAll) drop(g, n);
      w_[g].make_operand();
    } else {
      w_[g].weigh_at_once([&] { rescale(g); });
    }
  }
  /// The same of all its rows where others share them.
  __device__ __forceinline__ void weigh_together(int n) {
    const auto rescale_rows = [&](int g) { rescale(g); };
    if constexpr (kAll) {
      shared_.weigh(w_, rescale_rows, [&](int g) { drop(g, n); });
    } else {
      shared_.weigh(w_, rescale_rows);
    }
  }
  /// Softcap, bias and ALiBi: raw products become base-2 scores (S1).
  __device__ __forceinline__ void transform(int n) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float(&s)[kKeys / 2] = w_[g].s;
      if (p.score.capped) {
#pragma unroll
        for (float& x : s) x = capped_tanh(p.score.pre, x) * p.score.post;
      } else {
#pragma unroll
        for (float& x : s) x *= p.score.pre;
      }
      add_extras<Axis::rows>(
          p.extras,
          {tile_.sequence.batch, tile_.head, row_of(g, 0), first_key(n) + lane_ % 4 * 2,
           tile_.band.seqlen_q, tile_.band.seqlen_k},
          s);
    }
  }
  /// Dropout of the weights (S8); their sum has been taken.
  __device__ __forceinline__ void drop(int g, int n) {
    if (!p.dropout.active()) return;
    drop_weights(
        p.dropout, tile_.sequence.batch, tile_.head, first_key(n), lane_,
        [&](int half) { return row_of(g, half); }, w_[g].s);
  }

  // ---- products ----

  __device__ __forceinline__ void hold_queries() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kD / 16; ++i) {
        ptx::load_matrices(held_ + (g * kD / 16 + i) * 4, query_address(g, i));
      }
    }
  }
  /// Of 16 rows and 16 columns of the warp's queries.
  __device__ __forceinline__ std::uint32_t query_address(int g, int i) const {
    return (query_ ^ i % 4 * 32) + g * 16 * 128 + i / 4 * K.block_m * 128;
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(int n) {
    clear_scores();
    multiply_keys<0, kKeys / 16>(n, [](int) {});
  }
  __device__ __forceinline__ void clear_scores() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) w_[g].s[i] = 0.0F;
    }
  }
  /// Of 16 keys each; between(i): something else after the i-th fragment.
  template <int kFrom, int kTo, class Between>
  __device__ __forceinline__ void multiply_keys(int n, const Between& between) {
    // Lanes 0 to 7 name rows of keys 0 to 7 and the first 8 columns, 8 to 15 the other 8 columns,
    // 16 to 31 the same of keys 8 to 15.
    const std::uint32_t keys = key_ + n % kStages * kKBytes;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      std::uint32_t a[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if constexpr (kSpares) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[g][j] = held_[(g * kD / 16 + i) * 4 + j];
        } else {
          ptx::load_matrices(a[g], query_address(g, i));
        }
      }
#pragma unroll
      for (int j = kFrom; j < kTo; ++j) {
        std::uint32_t b[4];
        ptx::load_matrices(b, (keys ^ i % 4 * 32) + (i / 4 * kN + j * 16) * 128);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          ptx::mma<kType>(w_[g].s + j * 8, a[g], b[0], b[1]);
          ptx::mma<kType>(w_[g].s + j * 8 + 4, a[g], b[2], b[3]);
        }
        between(i * (kTo - kFrom) + j - kFrom);
      }
    }
  }

  /// O += P V.
  __device__ __forceinline__ void multiply_values(int n) {
    multiply_values<0, kN / 16>(n, [](int) {});
  }
  template <int kFrom, int kTo, class Between>
  __device__ __forceinline__ void multiply_values(int n, const Between& between) {
    // Lanes 0 to 15 name rows of values and the first 8 columns, 16 to 31 the other 8.
    const std::uint32_t values = value() + n % kStages * kVBytes;
#pragma unroll
    for (int j = kFrom; j < kTo; ++j) {
      std::uint32_t a[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) weights(a[g], g, j);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        std::uint32_t b[4];
        ptx::load_matrices_across(b, (values ^ i % 4 * 32) + (i / 4 * kN + j * 16) * 128);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          float* const o = o_[g] + i * 8;
          ptx::mma<kType>(o, a[g], b[0], b[1]);
          ptx::mma<kType>(o + 4, a[g], b[2], b[3]);
        }
        between((j - kFrom) * (kColumns / 16) + i);
      }
    }
  }

  /// Of the lane in the first 16 columns of a buffer of values: as in those of its warp's queries.
  /// Made of what is there, as registers are few.
  __device__ __forceinline__ std::uint32_t value() const {
    return query_ - q_ - warp_ * kRows * 128 + v_ + part_ * kColumns / 64 * kN * 128;
  }

  /// Of the j-th 16 keys of a block, as the A operand.
  __device__ __forceinline__ void weights(std::uint32_t (&a)[4], int g, int j) const {
    if constexpr (kParts > 1) {
      shared_.load(a, g, j);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = w_[g].operand[j * 4 + i];
    }
  }

  // ---- rows: a thread has two of each 16, its half-th ----

  __device__ __forceinline__ int row_of(int g, int half) const {
    return tile_.first_row + warp_ * kRows + g * 16 + lane_ / 4 + 8 * half;
  }
  __device__ __forceinline__ int query_of(int g, int half) const {
    return p.rows.query_of(row_of(g, half));
  }

  /// Blocks of keys from there on lie to the right of what the warp's rows see.
  __device__ __forceinline__ int end_of_warp(const core::Band& band, int first_row,
                                             int row_count) const {
    const int first = first_row + warp_ * kRows;
    if (first >= row_count) return 0;
    const int last = core::min(first + kRows, row_count) - 1;
    return core::ceil_div(band.keys_of(p.rows.query_of(last)).end, kN);
  }

  /// Of the warp's keys of block n.
  __device__ __forceinline__ int first_key(int n) const { return n * kN + part_ * kKeys; }
  __device__ __forceinline__ void mask(int n) {
    const int first = first_key(n) + lane_ % 4 * 2;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const core::Range keys = tile_.band.keys_of(query_of(g, half));
        mask_row(w_[g].s, half, {keys.begin - first, keys.end - first}, -core::kInfinity);
      }
    }
  }

  // ---- results ----

  __device__ __forceinline__ bool row_exists(int g, int half) const {
    return query_of(g, half) < tile_.band.seqlen_q;
  }
  __device__ __forceinline__ void store_lse(int g, int half, float x) const {
    const int row = row_of(g, half);
    const std::int64_t first = tile_.sequence.lse_index(p.lse_head, p.work.heads << p.rows.shift,
                                                        tile_.head << p.rows.shift, 0);
    const bool stores = p.softmax_lse != nullptr && lane_ % 4 == 0 && part_ == 0;
    ptx::store_if(row_exists(g, half) && stores,
                  p.softmax_lse + first + p.rows.member_of(row) * p.lse_head + p.rows.query_of(row),
                  x);
  }
  __device__ __forceinline__ std::uint16_t* output_of(int g, int half) const {
    const int row = row_of(g, half);
    return static_cast<std::uint16_t*>(p.o) +
           tile_.sequence.query_offset(p.o_strides, 0, tile_.head << p.rows.shift) +
           p.rows.query_of(row) * p.o_strides.seqlen + p.rows.member_of(row) * p.o_strides.head +
           part_ * kColumns + store_column(lane_);
  }
  /// Of the thread's first column on, in what exists.
  __device__ __forceinline__ int columns_left() const { return p.head_dim_v - part_ * kColumns; }
  __device__ __forceinline__ float sink() const {
    return p.sink == nullptr ? -core::kInfinity : p.sink[tile_.head];
  }

  __device__ __forceinline__ void write_zeros() const {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int g = i / 2, half = i % 2;
      store_lse(g, half, sink());
      std::uint16_t* const to = output_of(g, half);
      const int end = row_exists(g, half) ? columns_left() - store_column(lane_) : 0;
      for (int c = 0; c < kColumns; c += 16) store_columns<K.any_layout>(c, end, to + c, 0, 0);
    }
  }

  __device__ __forceinline__ void write() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = w_[g].sum[half];
        sum += __shfl_xor_sync(~0U, sum, 1);
        sum += __shfl_xor_sync(~0U, sum, 2);
        if constexpr (kParts > 1) sum = shared_.sum_of(g, half, sum);
        const core::Softmax<float> row = {w_[g].reference[half] * w_[g].to_base2, sum};
        const core::FinishedRow<float> end = core::finish(row, p.sink != nullptr, sink());
        store_lse(g, half, core::lse_of(end.state));
        store_row<kType, K.any_layout>(o_[g], half, end.factor, row_exists(g, half), lane_,
                                       columns_left(), output_of(g, half));
      }
    }
  }

  const ForwardParams& p;
  const std::uint32_t q_, k_, v_;  ///< buffers
  ForwardLoads<K> loads_;
  const int warp_, part_, lane_;  ///< the warp's rows, and what it has of their keys and columns
  /// Of the lane in the first 16 columns; others by XOR, as rows are aligned.
  const std::uint32_t query_, key_;
  const SharedRows<K> shared_;

  ForwardTile& tile_;
  int own_end_ = 0;  ///< of the blocks that the warp's rows see

  Weights<kType, kKeys> w_[kGroups];
  std::uint32_t held_[kSpares ? kGroups * kD / 4 : 1];  ///< queries as operands, or unused
  float o_[kGroups][kColumns / 2];
};

template <core::Kernel K>
__device__ __forceinline__ void forward(const ForwardParams& p, char* shared) {
  const std::uint32_t start = ptx::shared_address(shared);
  const std::uint32_t base =
      (start + core::kChunkBytes - 1) / core::kChunkBytes * core::kChunkBytes;
  constexpr int kBuffers = core::mma_buffer_bytes(K);
  static_assert(sizeof(ForwardTile) <= core::kTileStateBytes);
  char* const state = shared + (base - start) + kBuffers + core::mma_place_bytes(K);
  auto& tile = *reinterpret_cast<ForwardTile*>(state);
  using Told = typename Forward<K>::Told;
  auto& told = *reinterpret_cast<Told*>(state + core::kTileStateBytes);
  Forward<K>(p, base, tile, told).run();
}

}  // namespace tessera::cuda::mma
