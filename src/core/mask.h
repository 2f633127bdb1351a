// Which key a query sees (S2, S3), and what that means for tiles: which keys a run of queries can
// see, which queries can see a run of keys, and whether a tile needs a mask at all. Kernels,
// planner and tile simulator use these functions and derive nothing themselves. Called by
// everything.
#pragma once

#include "core/divisor.h"
#include "tessera/types.hpp"

namespace tessera::core {

/// Half-open run of positions [begin, end); empty when end <= begin.
struct Range {
  int begin = 0;
  int end = 0;

  TESSERA_HD constexpr int size() const { return end > begin ? end - begin : 0; }
  TESSERA_HD constexpr bool empty() const { return end <= begin; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

TESSERA_HD constexpr Range intersect(Range a, Range b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

/// How much of a (queries x keys) tile is visible.
enum class Cover : std::uint8_t {
  none,     ///< no pair: skip the tile
  partial,  ///< some pairs: apply the mask
  full,     ///< every pair: no mask needed
};

/// A diagonal band of visible keys: query i sees keys [i + offset - left, i + offset + right],
/// clipped to [0, seqlen_k). Causal, sliding windows and their absence are all bands.
struct Band {
  int seqlen_q = 0;
  int seqlen_k = 0;
  int left = 0;    ///< >= 0
  int right = 0;   ///< >= 0
  int offset = 0;  ///< key position of query 0

  /// Keys that query i sees, clipped.
  TESSERA_HD constexpr Range keys_of(int query) const { return keys_of(Range{query, query + 1}); }

  /// Keys that at least one of the queries sees. Exact: bands of neighbouring queries overlap or
  /// touch.
  TESSERA_HD constexpr Range keys_of(Range queries) const {
    if (queries.empty()) return {0, 0};
    const int begin = max(queries.begin + offset - left, 0);
    const int end = min(queries.end - 1 + offset + right + 1, seqlen_k);
    return end > begin ? Range{begin, end} : Range{0, 0};
  }

  /// Queries that see at least one of the keys.
  TESSERA_HD constexpr Range queries_of(Range keys) const {
    if (keys.empty()) return {0, 0};
    const int begin = max(keys.begin - offset - right, 0);
    const int end = min(keys.end - 1 - offset + left + 1, seqlen_q);
    return end > begin ? Range{begin, end} : Range{0, 0};
  }

  TESSERA_HD constexpr bool visible(int query, int key) const {
    const Range keys = keys_of(query);
    return keys.begin <= key && key < keys.end;
  }

  /// Both ranges must lie inside the sequences and not be empty.
  TESSERA_HD constexpr Cover cover(Range queries, Range keys) const {
    if (intersect(keys_of(queries), keys).empty()) return Cover::none;
    const bool all_right = keys.end - 1 <= queries.begin + offset + right;
    const bool all_left = keys.begin >= queries.end - 1 + offset - left;
    return all_left && all_right ? Cover::full : Cover::partial;
  }
};

/// Keys in two runs that do not overlap: tokens that a window keeps, and the others. Kernels walk
/// over the first and then over the second.
struct KeyRuns {
  Range sinks, keys;

  TESSERA_HD constexpr int size() const { return sinks.size() + keys.size(); }
  TESSERA_HD constexpr bool empty() const { return size() == 0; }
  /// Those from the begin-th to before the end-th.
  TESSERA_HD constexpr KeyRuns part(int begin, int end) const {
    const int first = sinks.size();
    const Range some = intersect(sinks, {sinks.begin + begin, sinks.begin + end});
    const Range rest =
        intersect(keys, {keys.begin + max(begin - first, 0), keys.begin + max(end - first, 0)});
    return {some.empty() ? Range{0, 0} : some, rest.empty() ? Range{0, 0} : rest};
  }
  /// The first `count` keys of them, or as many as lie side by side; empty: there are none.
  TESSERA_HD constexpr Range first(int count) const {
    return after({sinks.begin, sinks.begin}, count);
  }
  /// The same of those that follow `block`, which is one of these.
  TESSERA_HD constexpr Range after(Range block, int count) const {
    if (block.end < sinks.end) return {block.end, min(block.end + count, sinks.end)};
    const int begin = max(block.end, keys.begin);
    return {begin, min(begin + count, keys.end)};
  }
  /// Those of them that an item has, which has these and others: what sink tokens are to these may
  /// be other keys to the item.
  TESSERA_HD constexpr KeyRuns among(const KeyRuns& item) const {
    const bool joined = sinks.end > item.keys.begin;
    const Range rest = joined ? Range{0, max(keys.end, sinks.end)} : keys;
    return {intersect(sinks, item.sinks), intersect(rest, item.keys)};
  }
  friend constexpr bool operator==(const KeyRuns&, const KeyRuns&) = default;
};

/// What one query sees.
struct QueryMask {
  Range keys;  ///< besides sink tokens
  int sink_tokens = 0;
  int first_of_tree = 0;   ///< the key that bit 0 of the word decides on; no tree: keys.end
  std::uint64_t tree = 0;  ///< bits of the last keys

  TESSERA_HD constexpr bool visible(int key) const {
    if (key < 0 || key >= keys.end || (key < keys.begin && key >= sink_tokens)) return false;
    return key < first_of_tree || (tree >> (key - first_of_tree) & 1) != 0;
  }
};

/// All of a sequence's mask (S2, S3): the band, cut by chunks; first keys that every query sees up
/// to its right end; and the bits that decide on the last keys.
struct SequenceMask {
  Band band;
  Divisor chunk = Divisor(0);  ///< 0: one
  int sink_tokens = 0;
  const std::uint64_t* tree = nullptr;  ///< of the sequence's queries; null: none

  /// Whether there is more than a band.
  TESSERA_HD constexpr bool special() const {
    return chunked() || sink_tokens != 0 || tree != nullptr;
  }
  /// Besides sink tokens; not clipped where there is nothing between them.
  TESSERA_HD constexpr int begin_of(int query) const {
    const int position = query + band.offset;
    return max(max(position - band.left, 0), chunked() ? chunk_begin(position) : 0);
  }
  TESSERA_HD constexpr int end_of(int query) const {
    const int position = query + band.offset;
    const int end = min(position + band.right + 1, band.seqlen_k);
    return max(chunked() ? min(end, chunk_begin(position) + chunk.value()) : end, 0);
  }
  /// Keys that some of the queries see, sink tokens aside, and what lies between these keys.
  TESSERA_HD constexpr Range keys_of(Range queries) const {
    if (queries.empty()) return {0, 0};
    const int begin = begin_of(queries.begin), end = end_of(queries.end - 1);
    return end > begin ? Range{begin, end} : Range{0, 0};
  }
  TESSERA_HD constexpr Range keys_of(int query) const { return keys_of({query, query + 1}); }
  /// The same with sink tokens.
  TESSERA_HD constexpr KeyRuns runs_of(Range queries) const {
    const Range keys = keys_of(queries);
    if (sink_tokens == 0 || queries.empty()) return {{0, 0}, keys};
    const int end = min(sink_tokens, end_of(queries.end - 1));
    return {{0, keys.empty() ? end : min(end, keys.begin)}, keys};
  }
  /// Keys that every one of the queries sees.
  TESSERA_HD constexpr Range common_keys(Range queries) const {
    if (queries.empty()) return {0, 0};
    const int end = end_of(queries.begin);
    const Range keys = {begin_of(queries.end - 1),
                        tree != nullptr ? min(end, first_of_tree()) : end};
    return keys.empty() ? Range{0, 0} : keys;
  }
  /// The key that bit 0 of the tree's words decides on.
  TESSERA_HD constexpr int first_of_tree() const { return band.seqlen_k - band.seqlen_q; }
  TESSERA_HD constexpr QueryMask of(int query) const {
    const Range keys = {begin_of(query), end_of(query)};
    if (tree == nullptr) return {keys, sink_tokens, keys.end, 0};
    return {keys, sink_tokens, first_of_tree(), tree[query]};
  }
  TESSERA_HD constexpr bool visible(int query, int key) const { return of(query).visible(key); }

 private:
  TESSERA_HD constexpr bool chunked() const { return chunk.value() != 0; }
  TESSERA_HD constexpr int chunk_begin(int position) const {
    const int before = position < 0 ? ~position : position, chunks = chunk.quotient(before);
    return (position < 0 ? ~chunks : chunks) * chunk.value();
  }
};

/// The band of a problem or of one packed sequence. window_left / window_right: -1 is unbounded.
TESSERA_HD constexpr Band make_band(int seqlen_q, int seqlen_k, std::int64_t window_left,
                                    std::int64_t window_right, Alignment alignment) {
  // Beyond seqlen_q + seqlen_k a bound binds nobody; clamping keeps all arithmetic inside int32.
  const std::int64_t unbounded = std::int64_t{seqlen_q} + seqlen_k;
  const auto clamp = [unbounded](std::int64_t bound) {
    return static_cast<int>(bound < 0 || bound > unbounded ? unbounded : bound);
  };
  return {seqlen_q, seqlen_k, clamp(window_left), clamp(window_right),
          alignment == Alignment::bottom_right ? seqlen_k - seqlen_q : 0};
}

}  // namespace tessera::core
