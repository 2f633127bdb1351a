// Which tiles a work item owns. Work is cut along (batch, head, block of query rows, split of the
// keys), the backward's along blocks of keys; CPU, GPU, planner and tile simulator turn an index
// into a piece of work here.
//
// Rows: all query heads of a group read the same keys, so they can share one row axis (S10): row r
// of a key/value head is query r / group of head head_k * group + r % group. Group 1 is the
// identity.
#pragma once

#include "core/mask.h"

namespace tessera::core {

/// The rows of one key/value head, of all query heads of its group.
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

/// One piece of work of a pass.
struct Work {
  int batch = 0;
  int head = 0;   ///< of WorkOrder::heads
  int block = 0;  ///< forward: of rows, backward: of keys
  int split = 0;  ///< forward: keys [split * split_n, (split + 1) * split_n) of those the rows see;
                  ///< backward: RowSteps of those that see the keys
  bool early = false;  ///< of one of WorkOrder::early heads
};

/// All pieces of a pass and the order in which they are taken. Late blocks come first: under a
/// causal mask their rows see the most keys, and work handed out longest first ends evenly. But
/// only `section` heads take turns, block after block: on a GPU as many as keep their keys in the
/// second-level cache between one block and the next, or one, head after head, where all blocks see
/// equally many; few, where tiles are handed out as multiprocessors get free (section_of). The last
/// section takes what would be less than one along. The splits of a block follow each other (at),
/// or take turns as heads do (backward_at). Blocks and splits are those of the longest sequence; a
/// shorter one leaves its surplus pieces empty.
struct WorkOrder {
  int batch = 1;
  int heads = 1;  ///< of a sequence: PlanData::row_heads query heads each
  int blocks = 1;
  int splits = 1;
  int block_m = 0;  ///< forward: rows of a block
  /// A GPU's backward that adds to dQ in order: of so many heads, the last, a section of their own,
  /// the early keys begin, of others the late ones (RowWalk).
  int early = 0;
  std::int64_t section = 1;  ///< of the heads of all sequences

  /// Index: wide enough for count(); a GPU's has 32 bits.
  template <class Index = std::int64_t>
  TESSERA_HD constexpr Index count() const {
    return Index{batch} * heads * blocks * splits;
  }

  template <class Index>
  TESSERA_HD constexpr Work at(Index index) const {
    const Index all = Index{batch} * heads, turns = static_cast<Index>(section);
    Index split = 0;
    if (splits > 1) {
      split = index % splits;
      index /= splits;
    }
    const Index last = max(all / turns - 1, Index{0}) * turns;
    const Index first = min(index / (blocks * turns) * turns, last);
    const Index rest = index - first * blocks;
    const Index width = first == last ? all - last : turns;
    const Index head = first + rest % width;
    return {static_cast<int>(head / heads), static_cast<int>(head % heads),
            blocks - 1 - static_cast<int>(rest / width), static_cast<int>(split)};
  }

  /// The same of a GPU's backward.
  template <class Index>
  TESSERA_HD constexpr Work backward_at(Index index) const {
    return early > 0 ? at_with_early(index) : at_with_splits(index);
  }

  /// Of a backward without early heads. Its splits of a head have rows of their own, so they take
  /// turns as heads do, and a section is of so many of them.
  template <class Index>
  TESSERA_HD constexpr Work at_with_splits(Index index) const {
    WorkOrder order = *this;
    order.heads = heads * splits;
    order.splits = 1;
    Work work = order.at(index);
    work.split = work.head % splits;
    work.head /= splits;
    return work;
  }

  /// The block of keys that a GPU's backward makes of a piece. In any order early ones come first:
  /// under a causal mask more rows see them.
  TESSERA_HD constexpr int key_block(const Work& work, bool in_order) const {
    return in_order && !work.early ? work.block : blocks - 1 - work.block;
  }

  /// The i-th index of multiprocessor `worker` of `workers`. Every other round goes backwards, so
  /// that nobody gets the longest piece of each.
  TESSERA_HD constexpr static int index_of(int i, int worker, int workers) {
    return i * workers + (i % 2 == 0 ? worker : workers - 1 - worker);
  }

 private:
  /// Of a backward whose last heads begin with early keys; there are no splits.
  template <class Index>
  TESSERA_HD constexpr Work at_with_early(Index index) const {
    WorkOrder order = *this;
    const int late = batch * heads - early;
    const Index before = Index{late} * blocks;
    order.batch = 1;
    order.heads = late;
    const bool is_early = index >= before;
    if (is_early) {
      index -= before;
      order.heads = early;
      order.section = early;
    }
    Work work = order.at(index);
    if (is_early) work.head += late;
    work.early = is_early;
    work.batch = work.head / heads;
    work.head %= heads;
    return work;
  }
};

/// Pieces of a CPU's decoding in their order: a split of neighbouring heads, which are read
/// together.
struct DecodeOrder {
  int batch = 1;
  int heads = 1;  ///< of WorkOrder
  int splits = 1;
  int width = 1;  ///< heads of a piece; the last one of a sequence may have fewer

  struct Piece {
    int batch, head, heads, split;
  };

  TESSERA_HD constexpr int groups() const { return ceil_div(heads, width); }
  TESSERA_HD constexpr std::int64_t count() const {
    return std::int64_t{batch} * groups() * splits;
  }
  TESSERA_HD constexpr Piece at(std::int64_t index) const {
    const std::int64_t group = index / splits;
    const int head = static_cast<int>(group % groups()) * width;
    return {static_cast<int>(group / groups()), head, min(width, heads - head),
            static_cast<int>(index % splits)};
  }
};

/// Pieces of a CPU's backward in their order. A wave is as many heads as there are workers: theirs
/// is what stays in the caches. Its heads' rows are prepared, tile by tile; then their blocks of
/// keys follow.
struct BackwardOrder {
  std::int64_t heads = 1;  ///< of all sequences
  std::int64_t wave = 1;   ///< at least 1
  std::int64_t tiles = 0;  ///< of a head
  std::int64_t blocks = 0;

  struct Piece {
    std::int64_t head;
    std::int64_t number;  ///< tile of rows, or, less `tiles`, block of keys
  };

  TESSERA_HD constexpr std::int64_t of_head() const { return tiles + blocks; }
  TESSERA_HD constexpr std::int64_t count() const { return heads * of_head(); }
  TESSERA_HD constexpr Piece at(std::int64_t index) const {
    const std::int64_t first = index / (wave * of_head()) * wave;
    const std::int64_t width = min(wave, heads - first);
    const std::int64_t rest = index - first * of_head();
    return {first + rest % width, rest / width};
  }
};

/// The part of the visible keys that one split covers; split_n = 0: all of them.
TESSERA_HD constexpr Range split_keys(Range keys, int split, int split_n) {
  if (split_n == 0) return keys;
  const std::int64_t begin = keys.begin + std::int64_t{split} * split_n;
  if (begin >= keys.end) return {keys.end, keys.end};
  return {static_cast<int>(begin), static_cast<int>(min<std::int64_t>(begin + split_n, keys.end))};
}

TESSERA_HD constexpr KeyRuns split_runs(const KeyRuns& keys, int split, int split_n) {
  if (split_n == 0) return keys;
  const std::int64_t begin = std::int64_t{split} * split_n;
  if (begin >= keys.size()) return {};
  return keys.part(static_cast<int>(begin),
                   static_cast<int>(min<std::int64_t>(begin + split_n, keys.size())));
}
/// How many of these are not empty, but the first, which exists.
TESSERA_HD constexpr int used_splits(const KeyRuns& keys, int split_n) {
  return split_n == 0 ? 1 : max(1, ceil_div(keys.size(), split_n));
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

/// Where blocks of keys add to dQ in order, nobody waits for one that begins later: those who add
/// before are handed out before, and a block of keys walks over the rows in the order in which they
/// have passed. If late keys begin, it walks from the first rows to the last: under a causal mask
/// whom a block of rows sees last is on the diagonal, others follow a step behind each other, and
/// hardly anyone waits. But the longest tiles come last then, and do not end together. If early
/// keys begin, it walks from the last rows to the first: short tiles even out the end, but of tiles
/// that begin at once each waits a step for the one before. So this is what the last heads do.
struct RowWalk {
  int flip = 0, base = 0;  ///< -1, of early keys: places count from the end

  TESSERA_HD constexpr bool early() const { return flip != 0; }
  /// The block of rows at a place of the walk.
  TESSERA_HD constexpr int block_at(int place) const { return (place ^ flip) + base; }
  /// The same blocks by their places.
  TESSERA_HD constexpr QueryBlocks places_of(const QueryBlocks& blocks) const {
    if (!early()) return blocks;
    return {blocks.seen, {base - blocks.full.end, base - blocks.full.begin}};
  }
  /// How many of the blocks of keys that a block of rows sees add before this one.
  TESSERA_HD constexpr int rank_of(Range keys, int key_block) const {
    return early() ? key_block - keys.begin : keys.end - 1 - key_block;
  }
};

/// seen: QueryBlocks::seen.
TESSERA_HD constexpr RowWalk row_walk(Range seen, bool early) {
  return early ? RowWalk{-1, seen.begin + seen.end} : RowWalk{};
}

/// What a GPU's backward walks over for a block of keys: the blocks of rows that see them, of one
/// query head of the group after another. Where pieces share the keys (WorkOrder::splits), each has
/// its run of these.
struct RowSteps {
  Range seen;     ///< QueryBlocks::seen
  int first = 0;  ///< of all heads' blocks
  int count = 0;

  struct Step {
    int member = 0;  ///< query head of the group
    int block = 0;   ///< of its rows, by place in the walk
  };
  /// The i-th of the run, which is not empty.
  TESSERA_HD constexpr Step at(int i) const {
    const int step = first + i;
    return {step / seen.size(), seen.begin + step % seen.size()};
  }
};

TESSERA_HD constexpr RowSteps row_steps(Range seen, int group, int split, int splits) {
  const int all = group * seen.size();
  if (splits == 1) return {seen, 0, all};
  const auto before = [&](int parts) {
    return static_cast<int>(std::int64_t{all} * parts / splits);
  };
  return {seen, before(split), before(split + 1) - before(split)};
}

}  // namespace tessera::core
