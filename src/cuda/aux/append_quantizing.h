// New keys and values on their way into a cache of 8 bits (S14), on any GPU: as append.h carries
// them, but that the threads which have a head's columns compare their numbers, where its scale is
// written, before they round them.
#pragma once

#include "cuda/aux/append.h"
#include "cuda/aux/rounding.h"

namespace tessera::cuda::aux {

/// Neighbouring elements of 8 bits, stored at once.
template <int kColumns>
struct alignas(kColumns) RoundedPiece {
  using Word = typename WordOf<kColumns>::Type;
  Word words[kColumns / sizeof(Word)];

  __device__ __forceinline__ RoundedPiece(Dtype dtype, const Exact (&x)[kColumns], Exact factor) {
    const auto scaled = [&](int i) {
      return i < kColumns ? x[i % kColumns] * factor : Exact(0.0F);
    };
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      words[i / 4] = static_cast<Word>(
          narrow_four(dtype, scaled(i), scaled(i + 1), scaled(i + 2), scaled(i + 3)));
    }
  }
};

/// A thread's columns of several heads as numbers: two pieces each.
template <Dtype kType, int kBytes>
struct UnitNumbers {
  using Its = Unit<kType, kBytes>;
  static constexpr int kHeads = kRoundedHeads, kColumns = Its::kColumns;
  Exact x[kHeads][2][kColumns];

  __device__ __forceinline__ explicit UnitNumbers(const Piece<kType, kBytes> (&pieces)[kHeads][2]) {
#pragma unroll
    for (int i = 0; i < kHeads * 2; ++i) {
      float columns[kColumns];
      pieces[i / 2][i % 2].widen(columns);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[i / 2][i % 2][c] = Exact(columns[c]);
    }
  }

  __device__ __forceinline__ void rotate(const typename Its::Turns& turns) {
    constexpr int kHalf = Its::kHalf;
#pragma unroll
    for (Exact(&both)[2][kColumns] : x) {
      if (turns.within) {
#pragma unroll
        for (int i = 0; i + 1 < kColumns; i += 2) {
          turn(turns.cos[i / 2], turns.sin[i / 2], both[0][i], both[0][i + 1]);
          const int pair = kColumns - kHalf + i / 2;
          turn(turns.cos[pair], turns.sin[pair], both[1][i], both[1][i + 1]);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) turn(turns.cos[i], turns.sin[i], both[0][i], both[1][i]);
    }
  }

  /// The largest magnitude of each head.
  __device__ __forceinline__ void most(Exact (&most)[kHeads]) const {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      most[i] = Exact(0.0F);
#pragma unroll
      for (int c = 0; c < 2 * kColumns; ++c) {
        most[i] = ptx::larger_magnitude(most[i], x[i][c / kColumns][c % kColumns]);
      }
    }
  }

 private:
  static __device__ __forceinline__ void turn(float cos, float sin, Exact& x, Exact& y) {
    const Exact turned = core::rotated_x(x, y, Exact(cos), Exact(sin));
    y = core::rotated_y(x, y, Exact(cos), Exact(sin));
    x = turned;
  }
};

/// The largest each of `threads` neighbours, a power of two; all threads of the block come here
/// together. warps: what they share.
template <int kCount>
__device__ __forceinline__ void largest_of(Exact (&x)[kCount], int threads,
                                           float (&warps)[kAppendThreads / 32][kRoundedHeads]) {
  largest(x, core::min(threads, 32));
  if (threads <= 32) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, first = warp & -(threads / 32);
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) warps[warp][i] = x[i].x;
  }
  __syncthreads();
  for (int other = first; other < first + threads / 32; ++other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = ptx::larger_magnitude(x[i], Exact(warps[other][i]));
  }
}

/// What a thread carries of one tensor's new rows. block: of the tensor's.
template <Dtype kType, int kBytes>
__device__ __forceinline__ void carry_rounded(const AppendParams& p, const CarriedRows& rows,
                                              int block) {
  __shared__ float warps[kAppendThreads / 32][kRoundedHeads];
  using Columns = Piece<kType, kBytes>;
  using Numbers = UnitNumbers<kType, kBytes>;
  constexpr int kHeads = Numbers::kHeads;
  const ThreadPlace at(rows, block);
  const int group = rows.head_units.quotient(at.row_unit), head = group * kHeads;
  const int heads = core::min(rows.heads - head, kHeads);
  const int place = at.row_unit - group * rows.head_units.value();
  const bool there = at.exists && place < rows.rotated_units + rows.plain_units;
  const Unit<kType, kBytes> unit(rows, p.interleaved, place);

  Columns pieces[kHeads][2] = {};
  if (there) load_heads(rows, unit, at.row, head, heads, pieces);
  Numbers numbers(pieces);
  const core::Slot slot = there ? p.places.slot_of(at.row) : core::Slot{};
  if (unit.turns && slot.exists()) {
    const std::int64_t position = p.places.position_of_new(at.row);
    if (position >= 0 && position < p.positions) numbers.rotate(unit.turns_of(p, position));
  }

  const bool written = rows.scales.of_slots();
  Exact most[kHeads];
  if (written) {
    numbers.most(most);
    largest_of(most, rows.head_units.value(), warps);
  }
  if (!slot.exists()) return;
  const float limit = core::limit_of(p.dtype_kv);
  char* const to = static_cast<char*>(rows.to) + slot.offset(rows.to_strides, head);
  const std::int64_t scale = p.places.scale_offset(rows.scales, at.row, slot, head);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= heads) continue;
    Exact factor(1.0F);
    const std::int64_t its_scale = scale + i * rows.scales.stride_head;
    if (written) {
      const Written scaled = Written::of(most[i], limit);
      factor = scaled.factor;
      if (place == 0) rows.written[its_scale] = scaled.scale.x;
    } else {
      factor = Exact(1.0F) / Exact(rows.scales.data[its_scale]);
    }
    using Rounded = RoundedPiece<Numbers::kColumns>;
    unit.store(to + i * rows.to_strides.head, Rounded(p.dtype_kv, numbers.x[i][0], factor),
               Rounded(p.dtype_kv, numbers.x[i][1], factor));
  }
}

/// The kernel, for rows of one type and a cache of 8 bits; a block for each of p.blocks().
template <Dtype kType>
__device__ __forceinline__ void append_quantizing(const AppendParams& p) {
  ptx::wait_for_grids();
  const BlockPlace at(p);
  if (at.queries) {
    carry<kType>(p, p.q, true, at.block);
  } else {
    const CarriedRows& rows = *at.rows;
    constexpr int kSize = static_cast<int>(size_of(kType));
    switch (rows.piece_bytes) {
      case 16: carry_rounded<kType, 16>(p, rows, at.block); break;
      case 4: carry_rounded<kType, 4>(p, rows, at.block); break;
      default: carry_rounded<kType, kSize>(p, rows, at.block);
    }
  }
  ptx::launch_dependents();
}

}  // namespace tessera::cuda::aux
