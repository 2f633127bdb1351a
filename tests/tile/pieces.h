// Where the Hopper backward keeps the dQ of a block of rows (cuda/sm90/backward_params.h), written
// down from the layout of wgmma's accumulators (cuda/ptx/wgmma.h): what the consumers add, what is
// read in the end.
#pragma once

#include "core/kernel.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/shape.h"

namespace tessera::tile {

/// Row and column of a block of rows and head_dim columns, and their place in its memory.
struct PieceElement {
  int row = 0, column = 0;
  int at = 0;
};

/// Row and column of accumulator i of a warpgroup's thread, in its 64 x 64.
inline PieceElement accumulator(int thread, int i) {
  return {16 * (thread / 32) + thread % 32 / 4 + 8 * (i / 2 % 2),
          8 * (i / 4) + 2 * (thread % 4) + i % 2, 0};
}

/// Which of the two consumers adds a piece: each has its own, or, where they have roles, the values
/// the first half, rounded down, and the keys the others (WideConsumer::kFirstPiece).
inline int consumer_of(const core::Kernel& row, int piece) {
  if (!core::splits_roles(row)) return piece;
  return piece < row.head_dim / 64 / 2 ? 0 : 1;
}

/// What a consumer adds of a piece from accumulator i of its thread (issue_queries, add_queries):
/// half of the rows where there are 128 of them, 64 columns where there are 64 rows.
inline PieceElement added(const core::Kernel& row, int piece, int thread, int i) {
  PieceElement x = accumulator(thread, i);
  (row.block_m == 128 ? x.row : x.column) += 64 * piece;
  x.at = piece * cuda::sm90::kPieceFloats + i / 4 * 512 + thread * 4 + i % 4;
  return x;
}

/// What the thread that finishes a block takes as accumulator i of a piece (finish_piece).
inline PieceElement finished(const core::Kernel& row, int pieces, int piece, int thread, int i) {
  PieceElement x = accumulator(thread, i);
  const int pieces_of_columns = pieces * 64 / row.block_m;
  x.row += piece / pieces_of_columns * 64;
  x.column += piece % pieces_of_columns * 64;
  x.at = piece * cuda::sm90::kPieceFloats + cuda::sm90::piece_place(thread, i / 4) + i % 4;
  return x;
}

/// The same of a warp that finishes a block beside the products, a quarter of a piece at a time:
/// its four turns stand for the warps of `thread`, i < 8 (PieceFinisher::write, write_quarter).
inline PieceElement finished_beside(const core::Kernel& row, int quarter, int thread, int i) {
  PieceElement x = accumulator(thread, i);
  const bool by_rows = row.block_m == 128;
  x.row += by_rows ? quarter / cuda::sm90::kQuarters * 64 : 0;
  x.column += (by_rows ? quarter % cuda::sm90::kQuarters : quarter) * 16;
  x.at = quarter * (cuda::sm90::kPieceFloats / cuda::sm90::kQuarters) + i / 4 * 512 + thread * 4 +
         i % 4;
  return x;
}

}  // namespace tessera::tile
