// What the kernel that lays rows of v out as tiles is given: values filled in by
// cuda/lay_values.cpp.
#pragma once

#include "core/quantize.h"
#include "core/value_tiles.h"
#include "cuda/source.h"

namespace tessera::cuda::aux {

/// Threads of a block, which has a tile's keys and so many columns of one head; and columns that a
/// thread loads at once, 16 bytes.
inline constexpr int kLayThreads = 128, kLayColumns = 64, kLayUnit = 16;

struct LayValuesParams {
  core::Sequences sequences;
  core::RowPieces pieces;    ///< keys of a tile
  core::Divisor heads;       ///< of keys and values
  core::Divisor groups;      ///< of kLayColumns columns, of a tile
  Source from;               ///< rows of 8 bits that begin at multiples of 16 bytes
  void* to = nullptr;        ///< tiles
  core::Strides to_strides;  ///< bytes, of batch and head
  core::ValueTiles tiles;
  int dim = 0;  ///< columns of a row, a multiple of kLayUnit
  std::int64_t blocks = 0;
};

}  // namespace tessera::cuda::aux
