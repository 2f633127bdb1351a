// What a warpgroup's accumulators are in terms of rows and columns (ptx/wgmma.h has the layout),
// and how they reach a 16-bit tensor.
#pragma once

#include "core/mask.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"

namespace tessera::cuda {

/// A condition that is the same in all lanes: the compiler sees that of a vote, but not of what
/// comes from memory, and after a branch that may diverge no descriptor stays in uniform registers.
__device__ __forceinline__ bool agreed(bool x) { return __any_sync(~0U, x); }

/// A warpgroup makes 0 of the rows from `valid` on of a buffer (chunks of columns, kRows each).
template <int kRows>
__device__ __forceinline__ void clear_rows(std::uint32_t data, int chunks, int valid) {
  constexpr std::uint32_t kZeros[4] = {};
#pragma unroll 1
  for (int i = valid * 8 + static_cast<int>(threadIdx.x) % 128; i < kRows * 8; i += 128) {
    for (int c = 0; c < chunks; ++c) ptx::store_shared(data + (c * kRows * 8 + i) * 16, kZeros);
  }
}

/// An element of a tensor of any type; a 16-bit one comes as its bits.
__device__ __forceinline__ float to_float(float x, Dtype) { return x; }
__device__ __forceinline__ float to_float(std::uint16_t bits, Dtype dtype) {
  static_assert(kPlainDtypes == 3);
  return dtype == Dtype::bf16 ? ptx::widen<Dtype::bf16>(bits) : ptx::widen<Dtype::f16>(bits);
}
/// Element `at` becomes x.
__device__ __forceinline__ void store_float(void* tensor, Dtype dtype, std::int64_t at, float x) {
  static_assert(kPlainDtypes == 3);
  if (dtype == Dtype::f32) {
    static_cast<float*>(tensor)[at] = x;
  } else {
    const std::uint32_t pair =
        dtype == Dtype::bf16 ? ptx::pack<Dtype::bf16>(x, 0.0F) : ptx::pack<Dtype::f16>(x, 0.0F);
    static_cast<std::uint16_t*>(tensor)[at] = static_cast<std::uint16_t>(pair);
  }
}

/// Of a warpgroup's 64 rows, the thread's half-th (of two).
__device__ __forceinline__ int fragment_row(int warp, std::uint32_t lane, int half) {
  return warp * 16 + static_cast<int>(lane / 4) + 8 * half;
}
/// How many of a thread's accumulators in a row of kColumns lie before a column, counted from its
/// first one.
template <int kColumns>
__device__ __forceinline__ int fragment_count_before(int column) {
  const int c = core::min(core::max(column, 0), kColumns);
  return core::min(c / 8 * 2 + core::min(c % 8, 2), kColumns / 4);
}

/// Accumulators of the half-th row outside `columns` become `value`; columns are counted from the
/// thread's first one. Bit i of a word stands for the i-th of the thread's accumulators in the row.
/// The words are looked at seven bits at a time, as one instruction moves so many into predicates.
template <int kCount>
__device__ __forceinline__ void mask_row(float (&x)[kCount], int half, core::Range columns,
                                         float value) {
  constexpr int kInRow = kCount / 2, kBits = 7;
  const int begin = fragment_count_before<kCount * 2>(columns.begin);
  const int end = fragment_count_before<kCount * 2>(columns.end);
  const std::uint32_t kept = ptx::bits(begin, core::max(end - begin, 0));
#pragma unroll
  for (int i = 0; i < kInRow; i += kBits) {
    const std::uint32_t part = ptx::opaque(kept >> i);
#pragma unroll
    for (int j = i; j < core::min(i + kBits, kInRow); ++j) {
      float& element = x[j / 2 * 4 + half * 2 + j % 2];
      if ((part >> (j - i) & 1) == 0) element = value;
    }
  }
}

/// Of two lanes whose numbers differ by kBit, a of the one that has it and b of the other change
/// places.
template <std::uint32_t kBit = 1>
__device__ __forceinline__ void swap_in_pair(std::uint32_t lane, std::uint32_t& a,
                                             std::uint32_t& b) {
  const bool has = (lane & kBit) != 0;
  const std::uint32_t other = __shfl_xor_sync(~0U, has ? a : b, kBit);
  if (has) {
    a = other;
  } else {
    b = other;
  }
}
/// Word i of a quad's lane j and word j of its lane i change places.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t lane, std::uint32_t (&word)[4]) {
  swap_in_pair<1>(lane, word[0], word[1]);
  swap_in_pair<1>(lane, word[2], word[3]);
  swap_in_pair<2>(lane, word[0], word[2]);
  swap_in_pair<2>(lane, word[1], word[3]);
}

// A quad of lanes writes 16 columns of a row, lanes 0 and 2 the first 8, lanes 1 and 3 the others.

/// The lane's first column of each 16.
__device__ __forceinline__ int store_column(std::uint32_t lane) {
  return static_cast<int>(lane % 2 * 8 + lane % 4 / 2 * 4);
}

/// Four neighbouring columns of a row, from `column` on, to their address. end: of the columns.
template <bool kAnyLayout>
__device__ __forceinline__ void store_columns(int column, int end, std::uint16_t* to,
                                              std::uint32_t a, std::uint32_t b) {
  if constexpr (kAnyLayout) {
    const std::uint32_t words[2] = {a, b};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::store_if(column + i < end, to + i,
                    static_cast<std::uint16_t>(words[i / 2] >> i % 2 * 16));
    }
  } else {
    ptx::store_if(column < end, to, a, b);
  }
}

/// kColumns of accumulators' half-th row, times `scale`, as 16-bit elements that pack(low, high)
/// makes two of. row: its address plus store_column; dim: its columns.
template <int kColumns, bool kAnyLayout, int kCount, class Pack>
__device__ __forceinline__ void store_row(const float (&x)[kCount], int half, float scale,
                                          bool exists, std::uint32_t lane, int dim,
                                          std::uint16_t* row, const Pack& pack) {
  const int end = exists ? dim - store_column(lane) : 0;  // of the columns from the lane's first on
#pragma unroll
  for (int c = 0; c < kColumns; c += 16) {
    const int at = c / 2 + 2 * half;
    std::uint32_t a = pack(x[at] * scale, x[at + 1] * scale);
    std::uint32_t b = pack(x[at + 4] * scale, x[at + 5] * scale);
    swap_in_pair(lane, a, b);
    store_columns<kAnyLayout>(c, end, row + c, a, b);
  }
}
/// All of them, in the storage type.
template <Dtype kType, bool kAnyLayout, int kCount>
__device__ __forceinline__ void store_row(const float (&x)[kCount], int half, float scale,
                                          bool exists, std::uint32_t lane, int dim,
                                          std::uint16_t* row) {
  store_row<kCount * 2, kAnyLayout>(x, half, scale, exists, lane, dim, row,
                                    [](float a, float b) { return ptx::pack<kType>(a, b); });
}

}  // namespace tessera::cuda
