// Quantising (S14) on any GPU, one launch: a block of threads has rows of a piece of a sequence, of
// q, of k or of v. Every fp32 number is an Exact, so its bits are the CPU's.
#pragma once

#include "cuda/aux/quantize_plain.h"
#include "cuda/aux/quantize_rows.h"
#include "cuda/aux/quantize_tiles.h"
#include "cuda/ptx/grid.h"

namespace tessera::cuda::aux {

/// How much a kernel asks of what it is given: nothing is known; p.usual(); p.plain().
enum class Known : std::uint8_t { nothing, usual, plain };

/// What its blocks of threads share.
template <bool kPlain>
struct SharedOf {
  using Type = QuantizeShared;
};
template <>
struct SharedOf<true> {
  using Type = PlainShared;
};

/// The kernel, for inputs of one type; a block for each of p.blocks().
template <Dtype kType, Known kKnown>
__device__ __forceinline__ void quantize(const QuantizeParams& p) {
  constexpr bool kPlain = kKnown == Known::plain, kUsual = kKnown != Known::nothing;
  __shared__ typename SharedOf<kPlain>::Type shared;
  ptx::wait_for_grids();
  const int block = static_cast<int>(blockIdx.x), keys = static_cast<int>(p.rows[0].blocks);
  const int values = keys + static_cast<int>(p.rows[1].blocks);
  const int which = block < keys ? 0 : block < values ? 1 : 2;
  const QuantizedRows& rows = p.rows[which];
  const int mine = block - (block < keys ? 0 : block < values ? keys : values);
  const int piece = rows.groups.quotient(mine);
  const int head = (mine - piece * rows.groups.value()) * rows.side;
  const core::RowRange range = rows.pieces.of(piece);
  if (range.begin < range.end) {
    if (rows.tiles) {
      const HeadAt at = {p.sequences.at(range.batch), head};
      TileColumns<kType, kUsual>(rows, range, at, shared.tile).write();
    } else if constexpr (kPlain) {
      if (rows.turns && (p.signs != nullptr || p.hadamard > 1)) {
        PlainRows<kType, true>(p, which, range, head, shared).write();
      } else {
        PlainRows<kType, false>(p, which, range, head, shared).write();
      }
    } else {
      quantize_rows<kType, kUsual>(p, which, range, head, shared);
    }
  }
  ptx::launch_dependents();
}

}  // namespace tessera::cuda::aux
