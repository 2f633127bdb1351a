// What the kernel that quantises is given: values filled in by cuda/quantize.cpp.
#pragma once

#include "core/quantize.h"
#include "core/scales.h"
#include "core/value_tiles.h"
#include "cuda/source.h"

namespace tessera::cuda::aux {

/// Threads of a block.
inline constexpr int kQuantizeThreads = 128;
/// Columns that a thread loads at once: 16 bytes of 16-bit types. Two such are a piece, which it
/// stores at once; and it has two pieces of a row, half of its lanes' columns apart.
inline constexpr int kUnit = 8, kPiece = 2 * kUnit, kThreadColumns = 2 * kPiece;
/// Steps of which a block of threads keeps the numbers until their scale is known; of more of them
/// it makes them twice.
inline constexpr int kKeptSteps = 4;
/// Steps of a block whose rows need not come together, and blocks of which there are to be as many
/// before one has several steps: they fill any board several times.
inline constexpr int kFreeSteps = 4, kManyBlocks = 2048;

/// One tensor on its way. A row has `lanes` lanes, of kThreadColumns columns each. In a step a
/// block of threads has rows of `side` heads side by side; its rows are a piece of a sequence's.
struct QuantizedRows {
  Source from;
  void* to = nullptr;
  core::Strides to_strides;
  core::Scales scales;
  float* written = nullptr;        ///< scales.data, where they are written
  core::Scales off;                ///< of columns: k_mean or v_shift; none: nothing is subtracted
  core::Scales dot;                ///< of columns: k_mean for score_shift
  core::Scales shift;              ///< score_shift
  float* score_shift = nullptr;    ///< its numbers
  core::RowPieces pieces;          ///< rows of blocks
  core::Divisor groups;            ///< of `side` heads
  core::Divisor row_pieces;        ///< of kUnit columns, of tiles
  int heads = 0, heads_per_k = 1;  ///< that share a key/value head
  int dim = 0, lanes = 0, side = 1;
  std::int64_t blocks = 0;
  Dtype dtype = Dtype::e4m3;  ///< of the elements
  bool queries = false;
  bool turns = false;  ///< of q and k: they are rotated, have signs, are transformed
  bool tiles = false;
  bool whole = false;         ///< kUnit columns come and go at once
  bool whole_pieces = false;  ///< and kPiece of them go at once
  /// Rows are whole, and pairs of their rotation lie in one thread.
  bool direct = false;
};

struct QuantizeParams {
  core::Sequences sequences;
  core::RowPositions places;
  QuantizedRows rows[3];      ///< of q, k and v
  const void* cos = nullptr;  ///< rows of the tables
  const void* sin = nullptr;
  std::int64_t stride_cos = 0, stride_sin = 0;
  std::int64_t positions = 0;  ///< that they have
  Dtype table_dtype = Dtype::f32;
  int rotary = 0;  ///< columns that are rotated
  bool interleaved = false;
  const float* signs = nullptr;
  int hadamard = 0;

  /// Tensors by name.
  /// @{
  QuantizedRows& q() { return rows[0]; }
  QuantizedRows& k() { return rows[1]; }
  QuantizedRows& v() { return rows[2]; }
  /// @}
  std::int64_t blocks() const { return rows[0].blocks + rows[1].blocks + rows[2].blocks; }
  /// All that is there is e4m3 and comes and goes in whole pieces; rows are direct, and only tiles
  /// have scales by column.
  bool usual() const {
    for (const QuantizedRows& r : rows) {
      const bool as_rows = r.direct && r.whole_pieces && r.scales.by != Scaling::channel;
      if (r.blocks > 0 && (r.dtype != Dtype::e4m3 || !(r.tiles ? r.whole : as_rows))) return false;
    }
    return true;
  }
  /// The same of 16 bits; nothing is rotated, and no rows are shifted.
  bool plain(Dtype from) const {
    if (from == Dtype::f32 || !usual() || rotary > 0) return false;
    for (const QuantizedRows& r : rows) {
      if (r.blocks > 0 && !r.tiles && (r.off || r.dot || r.score_shift != nullptr)) return false;
    }
    return true;
  }
};

}  // namespace tessera::cuda::aux
