// What the forward by mma.sync (forward.h) copies to shared memory: a tile's queries, and its
// blocks of keys and of values from the right to the left. Chunks of 64 columns, rows of 128 bytes,
// units of 16 bytes at their number XOR the row's, so that neither copies nor ldmatrix meet in a
// bank.
#pragma once

#include "core/mma_shape.h"
#include "cuda/mma/forward_params.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/copy_rows.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class ForwardLoads {
  static constexpr int kN = K.block_n, kThreads = core::mma_threads(K), kStages = K.stages;
  static_assert(kN % (kThreads / 8) == 0);

 public:
  /// q, k, v: where queries, and the buffers of keys and of values, lie in shared memory.
  __device__ __forceinline__ ForwardLoads(const ForwardParams& params, std::uint32_t q,
                                          std::uint32_t k, std::uint32_t v)
      : p(params), q_(q), k_(k), v_(v) {}

  __device__ __forceinline__ void load_queries(const core::Sequence& sequence, int first_row,
                                               int head, int row_count) const {
    const auto* const data = static_cast<const std::uint16_t*>(p.q.data) +
                             sequence.query_offset(p.q.strides, 0, head << p.rows.shift);
    const auto from = [&](int row, const std::uint16_t*& x) {
      const int r = first_row + row;
      const bool exists = r < row_count;
      x = data +
          (exists ? p.rows.query_of(r) * p.q.strides.seqlen + p.rows.member_of(r) * p.q.strides.head
                  : 0);
      return exists;
    };
    if constexpr (K.any_layout) {
      copy_rows<K.block_m, kThreads>(q_, p.head_dim, core::ceil_div(K.head_dim, 64), from);
    } else {
      load<K.block_m, K.head_dim>(q_, p.head_dim, from);
    }
  }
  /// Block n of keys and of values is the next.
  __device__ __forceinline__ void begin(const core::Sequence& sequence, int head_k, int n) {
    left_ = sequence.seqlen_k - n * kN - (K.any_layout ? 0 : static_cast<int>(threadIdx.x) / 8);
    next_k_ = row_of(p.k, sequence, head_k, n);
    next_v_ = row_of(p.v, sequence, head_k, n);
  }
  /// The next block, number n: its keys, and then its values.
  /// @{
  __device__ __forceinline__ void load_keys(int n) {
    load_block<K.head_dim>(k_ + n % kStages * core::mma_key_bytes(K), next_k_, left_,
                           p.k.strides.seqlen, p.head_dim);
  }
  __device__ __forceinline__ void load_values(int n) {
    load_block<K.head_dim_v>(v_ + n % kStages * core::mma_value_bytes(K), next_v_, left_,
                             p.v.strides.seqlen, p.head_dim_v);
    left_ += kN;
  }
  /// @}

 private:
  /// kCount rows of kColumns columns, of which `dim` exist; from(row): where a row begins, of those
  /// that exist.
  template <int kCount, int kColumns, class From>
  __device__ __forceinline__ void load(std::uint32_t to, int dim, const From& from) const {
    constexpr int kRowsAtOnce = kThreads / 8;
    const int row = static_cast<int>(threadIdx.x) / 8, unit = static_cast<int>(threadIdx.x) % 8;
    const std::uint32_t at = to + row * 128 + (unit ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kCount / kRowsAtOnce; ++i) {
      const std::uint16_t* x = nullptr;
      const bool exists = from(row + i * kRowsAtOnce, x);
#pragma unroll
      for (int c = 0; c < core::ceil_div(kColumns, 64); ++c) {
        const bool inside = exists && c * 64 + unit * 8 < dim;
        ptx::copy_async(at + (c * kCount + i * kRowsAtOnce) * 128, x + c * 64 + unit * 8, inside);
      }
    }
  }

  /// The thread's unit of its first row of block n; of any layout the block's first element.
  __device__ __forceinline__ const std::uint16_t* row_of(const Source& source,
                                                         const core::Sequence& sequence, int head_k,
                                                         int n) const {
    const int key = K.any_layout ? n * kN : n * kN + static_cast<int>(threadIdx.x) / 8;
    const int column = K.any_layout ? 0 : static_cast<int>(threadIdx.x) % 8 * 8;
    return static_cast<const std::uint16_t*>(source.data) +
           sequence.key_offset(source.strides, key, head_k) + column;
  }
  /// The block at x; x goes on to the one on its left. left: keys from the thread's first row on.
  template <int kColumns>
  __device__ __forceinline__ void load_block(std::uint32_t to, const std::uint16_t*& x, int left,
                                             std::int64_t stride, int dim) const {
    if constexpr (K.any_layout) {
      copy_rows<kN, kThreads>(to, dim, core::ceil_div(kColumns, 64),
                              [&](int row, const std::uint16_t*& from) {
                                from = x + row * stride;
                                return row < left;
                              });
      x -= kN * stride;
      return;
    }
    constexpr int kRowsAtOnce = kThreads / 8;
    const int row = static_cast<int>(threadIdx.x) / 8, unit = static_cast<int>(threadIdx.x) % 8;
    const std::uint32_t at = to + row * 128 + (unit ^ row % 8) * 16;
    const std::int64_t step = kRowsAtOnce * stride;
    const std::uint16_t* from = x;
#pragma unroll
    for (int i = 0; i < kN / kRowsAtOnce; ++i) {
#pragma unroll
      for (int c = 0; c < core::ceil_div(kColumns, 64); ++c) {
        const bool inside = i * kRowsAtOnce < left && c * 64 + unit * 8 < dim;
        ptx::copy_async(at + (c * kN + i * kRowsAtOnce) * 128, from + c * 64, inside);
      }
      from += step;
    }
    x -= kN * stride;
  }

  const ForwardParams& p;
  const std::uint32_t q_, k_, v_;
  const std::uint16_t *next_k_ = nullptr, *next_v_ = nullptr;  ///< the thread's of the next blocks
  int left_ = 0;  ///< keys from the thread's first one of the next block on
};

}  // namespace tessera::cuda::mma
