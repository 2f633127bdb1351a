// New keys and values on their way into a cache (S13), and queries beside them, on any GPU. A block
// of threads carries whole rows of a tensor, or a row is carried by several blocks. A thread has
// the same columns of several heads: where the row goes, its position, cosines and sines are looked
// up once for all of them. It loads all that it carries before it asks, and stores last.
#pragma once

#include "cuda/aux/append_params.h"
#include "cuda/aux/tables.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/math.h"

namespace tessera::cuda::aux {

/// What a piece consists of.
template <int kBytes>
struct WordOf {
  using Type = std::uint32_t;
};
template <>
struct WordOf<2> {
  using Type = std::uint16_t;
};
template <>
struct WordOf<1> {
  using Type = std::uint8_t;
};

/// Neighbouring columns of a row, loaded and stored at once.
template <Dtype kType, int kBytes>
struct alignas(kBytes) Piece {
  static constexpr int kSize = static_cast<int>(size_of(kType));
  static constexpr int kColumns = kBytes / kSize;
  using Word = typename WordOf<kBytes>::Type;
  Word words[kBytes / sizeof(Word)];

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
        words[i / 2] = static_cast<Word>(
            ptx::pack<kType>(x[i], i + 1 < kColumns ? x[(i + 1) % kColumns] : 0.0F));
      }
    }
  }
};

/// Two pieces of a head's row.
template <Dtype kType, int kBytes>
class Unit {
  using Columns = Piece<kType, kBytes>;

 public:
  static constexpr int kColumns = Columns::kColumns, kHalf = kColumns > 1 ? kColumns / 2 : 1;

  /// unit: of the head's.
  __device__ __forceinline__ Unit(const CarriedRows& rows, bool interleaved, int unit)
      : turns(unit < rows.rotated_units), unit_(unit) {
    const int begin = turns ? 0 : rows.rotated, end = begin + (turns ? rows.rotated : rows.plain);
    const int units = turns ? rows.rotated_units : rows.plain_units;
    const int place = turns ? unit : unit - rows.rotated_units;
    // Single elements that are neighbours are a pair; else the halves of the columns are.
    const bool neighbours = kColumns == 1 && turns && interleaved;
    first_ = begin + (neighbours ? 2 * place : place);
    second_ = neighbours ? first_ + 1 : first_ + units;
    // A piece that is left over comes twice.
    if (second_ >= end) second_ = first_;
  }

  /// row: the head's first element.
  __device__ __forceinline__ void load(const void* row, Columns& first, Columns& second) const {
    first = static_cast<const Columns*>(row)[first_];
    second = static_cast<const Columns*>(row)[second_];
  }
  /// Stored: as many columns, of any type.
  template <class Stored>
  __device__ __forceinline__ void store(void* row, const Stored& first,
                                        const Stored& second) const {
    static_cast<Stored*>(row)[first_] = first;
    static_cast<Stored*>(row)[second_] = second;
  }

  /// A position's cosines and sines of the unit's pairs, which lie within pieces or have a column
  /// of each.
  struct Turns {
    bool within;
    float cos[kColumns], sin[kColumns];
  };
  __device__ __forceinline__ Turns turns_of(const AppendParams& p, std::int64_t position) const {
    Turns turns;
    turns.within = kColumns > 1 && p.interleaved;
    // Of the pairs of a unit one half each: if pairs lie within pieces, a piece's.
    const int pairs[2] = {turns.within ? first_ * kHalf : unit_ * kColumns,
                          turns.within ? second_ * kHalf : unit_ * kColumns + kHalf};
#pragma unroll
    for (int i = 0; i < kColumns; i += kHalf) {
      const int pair = pairs[i / kHalf];
      load_table<kHalf>(p.cos, p.table_dtype, position * p.stride_cos + pair, turns.cos + i);
      load_table<kHalf>(p.sin, p.table_dtype, position * p.stride_sin + pair, turns.sin + i);
    }
    return turns;
  }

  /// The units of several heads.
  template <int kHeads>
  __device__ __forceinline__ void rotate(const Turns& turns, Columns (&pieces)[kHeads][2]) const {
    if (turns.within) {
#pragma unroll
      for (Columns(&both)[2] : pieces) {
        turn_within(both[0], turns.cos, turns.sin);
        turn_within(both[1], turns.cos + kColumns - kHalf, turns.sin + kColumns - kHalf);
      }
      return;
    }
#pragma unroll
    for (Columns(&both)[2] : pieces) {
      float x[kColumns], y[kColumns];
      both[0].widen(x);
      both[1].widen(y);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) turn(turns.cos[i], turns.sin[i], x[i], y[i]);
      both[0].narrow(x);
      both[1].narrow(y);
    }
  }

  bool turns;

 private:
  static __device__ __forceinline__ void turn(float cos, float sin, float& x, float& y) {
    const float turned = x * cos - y * sin;
    y = x * sin + y * cos;
    x = turned;
  }
  /// The pairs that lie in a piece.
  static __device__ __forceinline__ void turn_within(Columns& piece, const float* cos,
                                                     const float* sin) {
    float x[kColumns];
    piece.widen(x);
#pragma unroll
    for (int i = 0; i + 1 < kColumns; i += 2) turn(cos[i / 2], sin[i / 2], x[i], x[i + 1]);
    piece.narrow(x);
  }

  int unit_, first_, second_;  ///< the pieces, by their numbers in the head's row
};

/// Which unit of which row a thread of a tensor's block has.
struct ThreadPlace {
  bool exists;
  std::int64_t row;
  int row_unit;

  __device__ __forceinline__ ThreadPlace(const CarriedRows& rows, int block) {
    // Several rows share a block, or several blocks a row.
    const int blocks_row = rows.row_blocks.quotient(block);
    const int part = block - blocks_row * rows.row_blocks.value();
    const int units = part * kAppendThreads + static_cast<int>(threadIdx.x);
    const int index = rows.row_units.quotient(units);
    // Fewer than 2^31 (append.cpp): the compiler is told, and leaves out how to divide by 64 bits.
    row = (blocks_row * rows.block_rows + index) & 0x7fffffff;
    exists = index < rows.block_rows && row < rows.rows;
    row_unit = units - index * rows.row_units.value();
  }
};

/// The unit's columns of `heads` heads of a row, from `head` on.
template <Dtype kType, int kBytes, int kHeads>
__device__ __forceinline__ void load_heads(const CarriedRows& rows, const Unit<kType, kBytes>& unit,
                                           std::int64_t row, int head, int heads,
                                           Piece<kType, kBytes> (&pieces)[kHeads][2]) {
  constexpr int kSize = Piece<kType, kBytes>::kSize;
  const char* const from =
      static_cast<const char*>(rows.from.data) +
      (core::row_offset(rows.from.strides, rows.seqlen, row) + head * rows.from.strides.head) *
          kSize;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i < heads) {
      unit.load(from + i * rows.from.strides.head * kSize, pieces[i][0], pieces[i][1]);
    }
  }
}

/// What a thread carries of one tensor's rows. block: of the tensor's; queries: the rows are.
template <Dtype kType, int kBytes>
__device__ __forceinline__ void carry(const AppendParams& p, const CarriedRows& rows, bool queries,
                                      int block) {
  using Columns = Piece<kType, kBytes>;
  const ThreadPlace at(rows, block);
  if (!at.exists) return;
  const std::int64_t row = at.row;
  constexpr int kHeads = thread_heads(kBytes);
  const int group = rows.head_units.quotient(at.row_unit), head = group * kHeads;
  const int heads = core::min(rows.heads - head, kHeads);
  const Unit<kType, kBytes> unit(rows, p.interleaved,
                                 at.row_unit - group * rows.head_units.value());

  Columns pieces[kHeads][2] = {};
  load_heads(rows, unit, row, head, heads, pieces);

  std::int64_t place;
  if (queries) {
    place = core::row_offset(rows.to_strides, rows.seqlen, row) + head * rows.to_strides.head;
  } else {
    const core::Slot slot = p.places.slot_of(row);
    if (!slot.exists()) return;
    place = slot.offset(rows.to_strides, head);
  }
  if (unit.turns) {
    const std::int64_t position =
        queries ? p.places.position_of_query(row) : p.places.position_of_new(row);
    if (position >= 0 && position < p.positions) {
      unit.rotate(unit.turns_of(p, position), pieces);
    }
  }
  char* const to = static_cast<char*>(rows.to) + place * Columns::kSize;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i < heads) {
      unit.store(to + i * rows.to_strides.head * Columns::kSize, pieces[i][0], pieces[i][1]);
    }
  }
}

template <Dtype kType>
__device__ __forceinline__ void carry(const AppendParams& p, const CarriedRows& rows, bool queries,
                                      int block) {
  constexpr int kSize = static_cast<int>(size_of(kType));
  switch (rows.piece_bytes) {
    case 16: return carry<kType, 16>(p, rows, queries, block);
    case 8: return carry<kType, 8>(p, rows, queries, block);
    case 4: return carry<kType, 4>(p, rows, queries, block);
    default: return carry<kType, kSize>(p, rows, queries, block);
  }
}

/// Which tensor's block a block of threads is.
struct BlockPlace {
  const CarriedRows* rows;
  bool queries;
  int block;

  __device__ __forceinline__ explicit BlockPlace(const AppendParams& p) {
    const int of_all = static_cast<int>(blockIdx.x), first_v = static_cast<int>(p.k.blocks);
    const int first_q = first_v + static_cast<int>(p.v.blocks);
    rows = of_all < first_v ? &p.k : of_all < first_q ? &p.v : &p.q;
    queries = of_all >= first_q;
    block = of_all - (of_all < first_v ? 0 : of_all < first_q ? first_v : first_q);
  }
};

/// The kernel, for rows of one type; a block for each of p.blocks().
template <Dtype kType>
__device__ __forceinline__ void append(const AppendParams& p) {
  ptx::wait_for_grids();
  const BlockPlace at(p);
  carry<kType>(p, *at.rows, at.queries, at.block);
  ptx::launch_dependents();
}

}  // namespace tessera::cuda::aux
