// New keys and values on their way into a cache (S13), and queries beside them, on any GPU. All
// units of a tensor's rows (append_params.h) are one long list, of which a block of threads takes
// neighbours, so any number of heads and columns fills the warps. Memory is the limit: a thread
// loads all of its units before it asks where they go, and stores last.
#pragma once

#include "cuda/aux/append_params.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"

namespace tessera::cuda::aux {

/// Neighbouring columns of a row: 16 bytes of them, or one.
template <Dtype kType, bool kWide>
struct Piece {
  static constexpr int kSize = static_cast<int>(size_of(kType));
  static constexpr int kColumns = kWide ? 16 / kSize : 1;
  std::uint32_t words[kWide ? 4 : 1] = {};

  /// at: elements from the tensor's first one.
  __device__ __forceinline__ void load(const void* tensor, std::int64_t at) {
    const char* const from = static_cast<const char*>(tensor) + at * kSize;
    if constexpr (kWide) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(from);
      words[0] = loaded.x;
      words[1] = loaded.y;
      words[2] = loaded.z;
      words[3] = loaded.w;
    } else if constexpr (kSize == 4) {
      words[0] = *reinterpret_cast<const std::uint32_t*>(from);
    } else {
      words[0] = *reinterpret_cast<const std::uint16_t*>(from);
    }
  }
  __device__ __forceinline__ void store(void* tensor, std::int64_t at) const {
    char* const to = static_cast<char*>(tensor) + at * kSize;
    if constexpr (kWide) {
      *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
    } else if constexpr (kSize == 4) {
      *reinterpret_cast<std::uint32_t*>(to) = words[0];
    } else {
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(words[0]);
    }
  }
  __device__ __forceinline__ void widen(float (&x)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if constexpr (kSize == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        x[i] = ptx::widen<kType>(static_cast<std::uint16_t>(words[i / 2] >> i % 2 * 16));
      }
    }
  }
  /// Rounds.
  __device__ __forceinline__ void narrow(const float (&x)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if constexpr (kSize == 4) {
        words[i] = __float_as_uint(x[i]);
      } else if (i % 2 == 0) {
        words[i / 2] = ptx::pack<kType>(x[i], i + 1 < kColumns ? x[(i + 1) % kColumns] : 0.0F);
      }
    }
  }
};

/// kCount neighbours of a table. at: elements from its first one; aligned: to all kCount of them.
template <int kCount>
__device__ __forceinline__ void load_table(const void* table, Dtype dtype, bool aligned,
                                           std::int64_t at, float (&x)[kCount]) {
  const char* const from = static_cast<const char*>(table) + at * size_of(dtype);
  if (dtype == Dtype::f32) {
    if (kCount % 4 == 0 && aligned) {
#pragma unroll
      for (int i = 0; i + 3 < kCount; i += 4) {
        const float4 loaded = *reinterpret_cast<const float4*>(from + i * 4);
        x[i] = loaded.x;
        x[i + 1] = loaded.y;
        x[i + 2] = loaded.z;
        x[i + 3] = loaded.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = reinterpret_cast<const float*>(from)[i];
    return;
  }
  static_assert(kDtypes == 3);
  std::uint32_t words[(kCount + 1) / 2];
  if (kCount == 8 && aligned) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(from);
    const std::uint32_t all[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = all[i];
  } else if (kCount % 2 == 0 && aligned) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      words[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
    }
  } else {
    const auto* const bits = reinterpret_cast<const std::uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      words[i / 2] = bits[i] | (i + 1 < kCount ? std::uint32_t{bits[i + 1]} << 16 : 0U);
    }
  }
  const bool bf16 = dtype == Dtype::bf16;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto bits = static_cast<std::uint16_t>(words[i / 2] >> i % 2 * 16);
    x[i] = bf16 ? ptx::widen<Dtype::bf16>(bits) : ptx::widen<Dtype::f16>(bits);
  }
}

/// Cosines and sines of kCount neighbouring pairs at a position that the tables have.
template <int kCount>
struct Turn {
  float cos[kCount], sin[kCount];

  __device__ __forceinline__ Turn(const AppendParams& p, std::int64_t position, int pair) {
    load_table(p.cos, p.table_dtype, p.tables_aligned, position * p.stride_cos + pair, cos);
    load_table(p.sin, p.table_dtype, p.tables_aligned, position * p.stride_sin + pair, sin);
  }
  __device__ __forceinline__ void rotate(int pair, float& x, float& y) const {
    const float turned = x * cos[pair] - y * sin[pair];
    y = x * sin[pair] + y * cos[pair];
    x = turned;
  }
};

/// Two pieces of a head's row.
template <Dtype kType, bool kWide, Carried kWhat>
class Unit {
  using Columns = Piece<kType, kWide>;
  static constexpr int kColumns = Columns::kColumns;

 public:
  /// unit: of the head's. Loads it, if it exists.
  __device__ __forceinline__ void load(const AppendParams& p, const CarriedRows& rows,
                                       std::int64_t row, int head, int unit) {
    row_ = row;
    head_ = head;
    exists_ = row < rows.rows;
    turns_ = unit < rows.rotated_units();
    unit_ = unit;
    const int begin = turns_ ? 0 : rows.rotated, end = begin + (turns_ ? rows.rotated : rows.plain);
    const int units = turns_ ? rows.rotated_units() : rows.plain_units();
    const int place = turns_ ? unit : unit - rows.rotated_units();
    // Single elements that are neighbours are a pair; else the halves of the columns are.
    const bool neighbours = !kWide && turns_ && p.interleaved;
    first_ = begin + (neighbours ? 2 * place : place);
    second_ = neighbours ? first_ + 1 : first_ + units;
    has_second_ = second_ < end;
    if (!exists_) return;
    const std::int64_t from =
        core::row_offset(rows.from.strides, rows.seqlen, row) + head * rows.from.strides.head;
    pieces_[0].load(rows.from.data, from + first_ * kColumns);
    if (has_second_) pieces_[1].load(rows.from.data, from + second_ * kColumns);
  }

  /// Where it goes, and its position.
  __device__ __forceinline__ void place(const AppendParams& p, const CarriedRows& rows) {
    position_ = -1;
    if (!exists_) return;
    if constexpr (kWhat == Carried::queries) {
      to_ = core::row_offset(rows.to_strides, rows.seqlen, row_) + head_ * rows.to_strides.head;
    } else {
      const core::Slot slot = p.places.slot_of(row_);
      exists_ = slot.exists();
      to_ = slot.offset(rows.to_strides, head_);
    }
    if constexpr (kWhat != Carried::values) {
      if (!exists_ || !turns_) return;
      const std::int64_t position = kWhat == Carried::queries ? p.places.position_of_query(row_)
                                                              : p.places.position_of_new(row_);
      if (position < p.positions) position_ = position;
    }
  }

  __device__ __forceinline__ void store(const AppendParams& p, const CarriedRows& rows) {
    if (!exists_) return;
    if constexpr (kWhat != Carried::values) {
      if (position_ >= 0) rotate(p);
    }
    pieces_[0].store(rows.to, to_ + first_ * kColumns);
    if (has_second_) pieces_[1].store(rows.to, to_ + second_ * kColumns);
  }

 private:
  __device__ __forceinline__ void rotate(const AppendParams& p) {
    if constexpr (kWide) {
      if (p.interleaved) {
        turn_inside(p, pieces_[0], first_);
        if (has_second_) turn_inside(p, pieces_[1], second_);
        return;
      }
    }
    const Turn<kColumns> turn(p, position_, unit_ * kColumns);
    float x[kColumns], y[kColumns];
    pieces_[0].widen(x);
    pieces_[1].widen(y);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) turn.rotate(i, x[i], y[i]);
    pieces_[0].narrow(x);
    pieces_[1].narrow(y);
  }
  /// The pairs of a piece that has whole ones.
  __device__ __forceinline__ void turn_inside(const AppendParams& p, Columns& piece, int number) {
    constexpr int kPairs = kColumns / 2;
    const Turn<kPairs> turn(p, position_, number * kPairs);
    float x[kColumns];
    piece.widen(x);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) turn.rotate(i, x[2 * i], x[2 * i + 1]);
    piece.narrow(x);
  }

  Columns pieces_[2];
  std::int64_t row_, to_ = 0, position_;
  int head_, unit_, first_, second_;  ///< the pieces, by their numbers in the head's row
  bool exists_, turns_, has_second_;
};

/// What a block of threads carries of one tensor's rows. block: of the tensor's.
template <Dtype kType, bool kWide, Carried kWhat>
__device__ __forceinline__ void carry(const AppendParams& p, const CarriedRows& rows,
                                      std::int64_t block) {
  const std::int64_t first = block * (kAppendThreads * kThreadUnits);
  const std::int64_t first_head = rows.head_units.quotient(first);  // of those of all rows
  const std::int64_t first_row = rows.heads.quotient(first_head);
  const int units_before = static_cast<int>(first - first_head * rows.head_units.value());
  const int heads_before = static_cast<int>(first_head - first_row * rows.heads.value());
  Unit<kType, kWide, kWhat> units[kThreadUnits];
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) {
    const int unit = units_before + i * kAppendThreads + static_cast<int>(threadIdx.x);
    const int head = heads_before + rows.head_units.quotient(unit);
    units[i].load(p, rows, first_row + rows.heads.quotient(head), rows.heads.remainder(head),
                  rows.head_units.remainder(unit));
  }
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) units[i].place(p, rows);
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) units[i].store(p, rows);
}

template <Dtype kType, Carried kWhat>
__device__ __forceinline__ void carry(const AppendParams& p, const CarriedRows& rows,
                                      std::int64_t block) {
  if (rows.wide) {
    carry<kType, true, kWhat>(p, rows, block);
  } else {
    carry<kType, false, kWhat>(p, rows, block);
  }
}

/// The kernel, for rows of one type.
template <Dtype kType>
__device__ __forceinline__ void append(const AppendParams& p) {
  const std::int64_t keys = p.k.blocks(), values = keys + p.v.blocks();
  const std::int64_t blocks = values + p.q.blocks();
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    if (block < keys) {
      carry<kType, Carried::keys>(p, p.k, block);
    } else if (block < values) {
      carry<kType, Carried::values>(p, p.v, block - keys);
    } else {
      carry<kType, Carried::queries>(p, p.q, block - values);
    }
  }
  ptx::launch_dependents();
}

}  // namespace tessera::cuda::aux
