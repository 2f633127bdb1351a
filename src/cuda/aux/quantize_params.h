// What the kernel that quantises is given: values filled in by cuda/quantize.cpp.
#pragma once

#include "core/quantize.h"
#include "core/scales.h"
#include "core/value_tiles.h"
#include "cuda/source.h"

namespace tessera::cuda::aux {

/// Threads of a block.
inline constexpr int kQuantizeThreads = 128;
/// Neighbouring columns of a row that a thread loads and stores at once, and how often: the second
/// time half of the columns that lanes have further on.
inline constexpr int kPiece = 8, kRowColumns = 2 * kPiece;
/// Steps of which a block of threads keeps the numbers until their scale is known; of more of them
/// it makes them twice.
inline constexpr int kKeptSteps = 8;
/// Steps of a block whose rows need not come together.
inline constexpr int kFreeSteps = 4;

/// One tensor on its way. A row has `lanes` lanes, of kRowColumns columns each. In a step a block
/// of threads has rows of `side` heads side by side; its rows are a piece of a sequence's.
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
  core::Divisor row_pieces;        ///< of kPiece columns, of tiles
  int heads = 0, heads_per_k = 1;  ///< that share a key/value head
  int dim = 0, lanes = 0, side = 1;
  std::int64_t blocks = 0;
  Dtype dtype = Dtype::e4m3;  ///< of the elements
  bool queries = false;
  bool turns = false;  ///< of q and k: they are rotated, have signs, are transformed
  bool tiles = false;
  /// Inputs come by 16 bytes, and outputs go by 8.
  bool whole = false;
};

struct QuantizeParams {
  core::Sequences sequences;
  core::RowPositions places;
  QuantizedRows q, k, v;
  const void* cos = nullptr;  ///< rows of the tables
  const void* sin = nullptr;
  std::int64_t stride_cos = 0, stride_sin = 0;
  std::int64_t positions = 0;  ///< that they have
  Dtype table_dtype = Dtype::f32;
  int rotary = 0;  ///< columns that are rotated
  bool interleaved = false;
  const float* signs = nullptr;
  int hadamard = 0;

  std::int64_t blocks() const { return q.blocks + k.blocks + v.blocks; }
};

}  // namespace tessera::cuda::aux
