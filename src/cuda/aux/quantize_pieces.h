// What quantising rows (quantize_rows.h) and tiles (quantize_tiles.h) on a GPU have in common:
// pieces of rows on their way in, and the largest number of a block of threads.
#pragma once

#include "cuda/aux/quantize_params.h"
#include "cuda/aux/rounding.h"

namespace tessera::cuda::aux {

/// What a block of threads shares that makes a tile.
struct TileShared {
  /// Of 256 columns: a word has four keys, in the order of tiles.
  std::uint32_t words[256][core::ValueTiles::kKeys / 4];
  float factors[core::ValueTiles::kKeys];  ///< of keys' blocks
  float columns[256];                      ///< factors of columns
  float most[kQuantizeThreads / 32];
};
/// The same of one that makes rows, or tiles.
union QuantizeShared {
  /// Numbers of steps, a thread's own.
  float4 kept[kKeptSteps - 1][kThreadColumns / 4][kQuantizeThreads];
  TileShared tile;
};
static_assert(sizeof(QuantizeShared) <= 48 * 1024);

struct alignas(8) Eight {
  std::uint32_t low, high;
};

/// Neighbouring columns of a row as they lie.
template <Dtype kType, int kColumns>
struct Raw {
  static constexpr int kSize = static_cast<int>(size_of(kType));
  static constexpr int kUnits = core::ceil_div(kColumns * kSize, 16);
  uint4 units[kUnits];

  /// Columns of a row that has `dim`; what it does not have is 0. whole: it has kUnit or none.
  __device__ __forceinline__ void load(const void* row, int column, int dim, bool whole) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = uint4{0, 0, 0, 0};
    if (column >= dim) return;
    if (whole) {
      const auto* const from =
          reinterpret_cast<const uint4*>(static_cast<const char*>(row) + column * kSize);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (column + i * 16 / kSize < dim) units[i] = from[i];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i < dim) load_one(row, column + i, i);
    }
  }
  /// Of four columns; those from `end` on and before 0 are 0.
  __device__ __forceinline__ void load_four(const void* row, int column, int end, bool whole) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = uint4{0, 0, 0, 0};
    if (whole) {
      if (column < 0 || column >= end) return;
      const char* const from = static_cast<const char*>(row) + column * kSize;
      if constexpr (kSize == 4) {
        units[0] = *reinterpret_cast<const uint4*>(from);
      } else {
        const Eight eight = *reinterpret_cast<const Eight*>(from);
        units[0].x = eight.low;
        units[0].y = eight.high;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i >= 0 && column + i < end) load_one(row, column + i, i);
    }
  }
  /// Columns 2 i and 2 i + 1, of 16 bits.
  __device__ __forceinline__ std::uint32_t pair(int i) const { return word(i); }
  __device__ __forceinline__ Exact at(int i) const {
    if constexpr (kSize == 4) return Exact(__uint_as_float(word(i)));
    if constexpr (kSize == 2) {
      return Exact(ptx::widen<kType>(static_cast<std::uint16_t>(word(i / 2) >> i % 2 * 16)));
    }
  }

 private:
  __device__ __forceinline__ void load_one(const void* row, int column, int i) {
    if constexpr (kSize == 4) {
      word(i) = static_cast<const std::uint32_t*>(row)[column];
    } else {
      word(i / 2) |= std::uint32_t{static_cast<const std::uint16_t*>(row)[column]} << i % 2 * 16;
    }
  }
  __device__ __forceinline__ std::uint32_t& word(int i) {
    uint4& unit = units[i / 4];
    return i % 4 == 0 ? unit.x : i % 4 == 1 ? unit.y : i % 4 == 2 ? unit.z : unit.w;
  }
  __device__ __forceinline__ std::uint32_t word(int i) const {
    const uint4& unit = units[i / 4];
    return i % 4 == 0 ? unit.x : i % 4 == 1 ? unit.y : i % 4 == 2 ? unit.z : unit.w;
  }
};

/// fp32 numbers of columns; those that do not exist are `otherwise`.
template <int kCount>
__device__ __forceinline__ void load_numbers(const float* from, int column, int dim, bool whole,
                                             float otherwise, float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = otherwise;
  if (whole) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      if (column + i >= dim) continue;
      const float4 four = *reinterpret_cast<const float4*>(from + column + i);
      x[i] = four.x;
      x[i + 1] = four.y;
      x[i + 2] = four.z;
      x[i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (column + i < dim) x[i] = from[column + i];
  }
}

/// The largest of all threads; most: words of their own, which may lie apart.
__device__ __forceinline__ Exact largest_of_block(Exact x, float* most, int apart) {
  x = largest(x, 32);
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32 * apart] = x.x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kQuantizeThreads / 32; ++warp) {
    x = ptx::larger_magnitude(x, Exact(most[warp * apart]));
  }
  __syncthreads();
  return x;
}

/// A sequence's head, of which a block of threads has rows.
struct HeadAt {
  core::Sequence sequence;
  int head;

  __device__ __forceinline__ std::int64_t offset(const core::Strides& strides, bool queries) const {
    return queries ? sequence.query_offset(strides, 0, head)
                   : sequence.key_offset(strides, 0, head);
  }
  /// Its scales, or the first of them.
  __device__ __forceinline__ const float* scale(const QuantizedRows& rows) const {
    const int owner = rows.scales.by == Scaling::token ? head : head / rows.heads_per_k;
    return rows.scales.of(sequence, owner);
  }
  __device__ __forceinline__ const float* columns(const core::Scales& numbers,
                                                  const QuantizedRows& rows) const {
    return numbers ? numbers.of(sequence, head / rows.heads_per_k) : nullptr;
  }
};

}  // namespace tessera::cuda::aux
