// Which key a query sees (S2, S3), and what that means for tiles: which keys a run of queries can
// see, which queries can see a run of keys, and whether a tile needs a mask at all. Kernels,
// planner and tile simulator use these functions and derive nothing themselves. Called by
// everything.
#pragma once

#include "core/hd.h"
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
