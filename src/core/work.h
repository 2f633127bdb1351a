// Which tiles a work item owns. Work is cut along (batch, key/value head, block of query rows,
// split of the keys); the kernels, the planner and the tile simulator turn an index into a piece of
// work here.
//
// Rows: all query heads of a group read the same keys, so they are packed into one row axis (S10):
// row r of a key/value head is query r / group of head head_k * group + r % group. Group 1 is the
// identity.
#pragma once

#include "core/mask.h"

namespace tessera::core {

/// The packed rows of one key/value head.
struct Rows {
  int seqlen_q = 0;
  int group = 1;

  TESSERA_HD constexpr std::int64_t count() const { return std::int64_t{seqlen_q} * group; }
  TESSERA_HD constexpr int query_of(std::int64_t row) const {
    return static_cast<int>(row / group);
  }
  /// Position of the row's query head inside its group.
  TESSERA_HD constexpr int member_of(std::int64_t row) const {
    return static_cast<int>(row % group);
  }

  /// Queries that rows [begin, end) belong to.
  TESSERA_HD constexpr Range queries_of(std::int64_t begin, std::int64_t end) const {
    if (end <= begin) return {0, 0};
    return {query_of(begin), query_of(end - 1) + 1};
  }
};

/// The same for a group of 2^shift heads, by shifts: what a GPU's threads do for every row.
struct ShiftedRows {
  int shift = 0;

  TESSERA_HD constexpr int query_of(int row) const { return row >> shift; }
  TESSERA_HD constexpr int member_of(int row) const { return row & ((1 << shift) - 1); }
  /// Queries that a run of rows, not empty, belongs to.
  TESSERA_HD constexpr Range queries_of(Range rows) const {
    return {query_of(rows.begin), query_of(rows.end - 1) + 1};
  }
};

/// One piece of forward work.
struct WorkItem {
  int batch = 0;
  int head_k = 0;
  int row_block = 0;  ///< rows [row_block * block_m, (row_block + 1) * block_m) of the grid's
  int split = 0;      ///< keys [split * split_n, (split + 1) * split_n) of those the rows see
};

/// All pieces of forward work. row_blocks and splits are those of the longest sequence; a shorter
/// one leaves its surplus items empty.
struct WorkGrid {
  int batch = 1;
  int heads_k = 1;
  int row_blocks = 1;
  int splits = 1;
  int block_m = 0;  ///< rows of a row block

  TESSERA_HD constexpr std::int64_t count() const {
    return std::int64_t{batch} * heads_k * row_blocks * splits;
  }

  /// Item by index. Late row blocks come first: under a causal mask they see the most keys, and
  /// work handed out longest first ends evenly.
  TESSERA_HD constexpr WorkItem item(std::int64_t index) const {
    const int split = static_cast<int>(index % splits);
    index /= splits;
    const int head_k = static_cast<int>(index % heads_k);
    index /= heads_k;
    const int b = static_cast<int>(index % batch);
    index /= batch;
    return {b, head_k, row_blocks - 1 - static_cast<int>(index), split};
  }
};

/// The order in which a GPU's multiprocessors take the tiles of query rows. Where row blocks see
/// unequal numbers of keys, `section` query heads take turns, longest tiles first: as many as keep
/// their keys in the second-level cache between one row block and the next; the last section takes
/// what would be less than one along. Otherwise section is 1: head after head.
struct TileOrder {
  int row_blocks = 1;
  int heads = 1;  ///< query heads of the whole batch
  int section = 1;

  struct Tile {
    int row_block, head;
  };

  TESSERA_HD constexpr int count() const { return row_blocks * heads; }

  TESSERA_HD constexpr Tile at(int index) const {
    const int last = max(heads / section - 1, 0) * section;
    const int first = min(index / (row_blocks * section) * section, last);
    const int rest = index - first * row_blocks;
    const int width = first == last ? heads - last : section;
    return {row_blocks - 1 - rest / width, first + rest % width};
  }

  /// The i-th tile of multiprocessor `worker` of `workers`. Every other round goes backwards, so
  /// that nobody gets the longest tile of each.
  TESSERA_HD constexpr static int index_of(int i, int worker, int workers) {
    return i * workers + (i % 2 == 0 ? worker : workers - 1 - worker);
  }
};

/// The part of the visible keys that one split covers; split_n = 0: all of them.
TESSERA_HD constexpr Range split_keys(Range keys, int split, int split_n) {
  if (split_n == 0) return keys;
  const std::int64_t begin = keys.begin + std::int64_t{split} * split_n;
  if (begin >= keys.end) return {keys.end, keys.end};
  return {static_cast<int>(begin), static_cast<int>(min<std::int64_t>(begin + split_n, keys.end))};
}

/// Blocks of block_n keys, counted from key 0, that a run of queries meets.
struct KeyBlocks {
  Range seen;  ///< at least one of the queries sees one of the keys
  Range full;  ///< of those: every query sees every key, so no mask is needed; may be empty
};

/// Queries must lie inside the sequence and not be empty.
TESSERA_HD constexpr KeyBlocks key_blocks(const Band& band, Range queries, int block_n) {
  const Range keys = band.keys_of(queries);
  const Range seen = {keys.begin / block_n, ceil_div(keys.end, block_n)};
  // What the last query's left end and the first query's right end leave.
  const int begin = max(0, queries.end - 1 + band.offset - band.left);
  const int end = max(0, min(band.seqlen_k, queries.begin + band.offset + band.right + 1));
  const Range full = intersect(seen, {ceil_div(begin, block_n), end / block_n});
  return {seen, full.empty() ? Range{seen.begin, seen.begin} : full};
}

/// Blocks of block_m queries, counted from query 0, that a run of keys meets: the mirror of
/// key_blocks for the backward pass.
struct QueryBlocks {
  Range seen;  ///< at least one of the queries sees one of the keys
  Range
      full;  ///< of those: all queries and keys exist, and every query sees every key; may be empty
};

/// The run must begin inside the sequence and not be empty; it may end beyond.
TESSERA_HD constexpr QueryBlocks query_blocks(const Band& band, Range keys, int block_m) {
  const Range queries = band.queries_of({keys.begin, min(keys.end, band.seqlen_k)});
  const Range seen = {queries.begin / block_m, ceil_div(queries.end, block_m)};
  // What the last key's left end and the first key's right end leave.
  const int begin = max(0, keys.end - 1 - band.offset - band.right);
  const int end = max(0, min(band.seqlen_q, keys.begin - band.offset + band.left + 1));
  const Range full = intersect(seen, {ceil_div(begin, block_m), end / block_m});
  if (keys.end > band.seqlen_k || full.empty()) return {seen, {seen.begin, seen.begin}};
  return {seen, full};
}

/// The rows of all query sequences in blocks of block_m, every sequence beginning a block of its
/// own: how the backward's accumulators lie.
struct RowBlocks {
  int block_m = 0;
  int per_sequence = 0;  ///< dense

  /// Of all sequences together; packed ones leave gaps. rows: of all queries.
  TESSERA_HD constexpr std::int64_t count(bool packed, std::int64_t rows,
                                          std::int64_t batch) const {
    return packed ? rows / block_m + batch : batch * per_sequence;
  }
  /// The first of a sequence; first_q: its first row of a packed batch.
  TESSERA_HD constexpr std::int64_t first_of(bool packed, std::int64_t first_q,
                                             std::int64_t batch) const {
    return packed ? first_q / block_m + batch : batch * per_sequence;
  }
};

/// Where one sequence lies: dense tensors have equal sequences, packed ones follow cu_seqlens
/// (S11).
struct Sequence {
  int seqlen_q = 0;
  int seqlen_k = 0;
  std::int64_t first_q = 0;  ///< packed: first row of q, o and softmax_lse; dense: 0
  std::int64_t first_k = 0;  ///< packed: first row of k and v; dense: 0
};

}  // namespace tessera::core
