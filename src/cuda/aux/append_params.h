// What the kernel that appends to a cache is given: values filled in by cuda/append.cpp.
#pragma once

#include "core/append.h"
#include "core/quantize.h"
#include "cuda/source.h"

namespace tessera::cuda::aux {

/// Threads of a block, and bytes that a thread carries, unless that were too many heads' pieces.
inline constexpr int kAppendThreads = 128, kThreadBytes = 64, kMostThreadHeads = 8;
inline constexpr int kMostPieceBytes = 16;

/// A block's threads compare the numbers of a head that is quantised: two pieces each.
inline constexpr int kMostRoundedColumns = 2 * kAppendThreads;

/// Of what is quantised: little code, as rows that have only shorter pieces than 16 bytes are rare.
inline constexpr int kRoundedHeads = 2;

/// Heads of which a thread carries the same two pieces.
TESSERA_HD constexpr int thread_heads(int piece_bytes) {
  return core::min(kThreadBytes / 2 / piece_bytes, kMostThreadHeads);
}

/// Rows of one tensor on their way: new keys, new values or queries. Columns come in pieces of 16,
/// 8 or 4 bytes or of one element, whichever is the longest that rows consist of; what the tables
/// have for half a piece is aligned like it. A unit is two pieces, of rotated columns those of the
/// same pairs, in each of thread_heads() heads, or of kRoundedHeads.
struct CarriedRows {
  Source from;
  void* to = nullptr;  ///< the cache, or where queries go
  core::Strides to_strides;
  std::int64_t rows = 0;  ///< of all sequences
  core::Divisor seqlen;   ///< of `from`, and of queries' `to`; packed: 0
  int heads = 0;
  int piece_bytes = 0;
  int rotated = 0, plain = 0;              ///< pieces of a head's rotated columns and the others
  int rotated_units = 0, plain_units = 0;  ///< of those
  /// Of a head and those carried with it. What is quantised has a power of two of them, of which
  /// the last may be none: they compare their numbers.
  core::Divisor head_units;
  core::Divisor row_units;   ///< of a row
  core::Divisor row_blocks;  ///< blocks of threads for a row
  int block_rows = 0;        ///< rows of a block; several where one does not fill it
  std::int64_t blocks = 0;
  core::Scales scales;       ///< of what is quantised
  float* written = nullptr;  ///< scales.data
};

struct AppendParams {
  core::Append places;
  CarriedRows k, v, q;
  const void* cos = nullptr;  ///< rows of the tables
  const void* sin = nullptr;
  std::int64_t stride_cos = 0, stride_sin = 0;
  std::int64_t positions = 0;  ///< that they have
  Dtype table_dtype = Dtype::f32;
  bool interleaved = false;
  Dtype dtype_kv = Dtype::f32;  ///< of the cache

  std::int64_t blocks() const { return k.blocks + v.blocks + q.blocks; }
};

}  // namespace tessera::cuda::aux
