// Items of different lengths, shared out in equal spans (Stream-K: Osama, Merrill, Cecka, Garland,
// Owens 2023). Items follow each other on a line; each costs so many units, and a fixed part before
// them. The line is cut at equal distances, wherever that is, so an item may have parts in several
// spans. Everybody who knows the lengths finds the cuts by himself.
#pragma once

#include "core/divisor.h"
#include "core/mask.h"

namespace tessera::core {

/// An item on the line.
struct SpanItem {
  int start = 0;  ///< where its fixed part begins
  int units = 1;  ///< at least 1
};

/// The line is shorter than 2^30.
struct Spans {
  int count = 1;   ///< of spans
  int fixed = 0;   ///< cost of an item besides its units
  int least = 1;   ///< no span is shorter
  int length = 1;  ///< of every span, but the last ones; cut() sets it

  TESSERA_HD constexpr int cost(int units) const { return fixed + units; }
  /// total: the cost of all items. by: `count`, or its Divisor.
  template <class Count>
  TESSERA_HD constexpr void cut(int total, const Count& by) {
    length = max(ceil_div(total, by), least);
  }
  TESSERA_HD constexpr void cut(int total) { cut(total, count); }
  /// The span that has a unit of the item.
  TESSERA_HD constexpr int span_of(const SpanItem& item, int unit) const {
    return (item.start + fixed + unit) / length;
  }
  /// The item's units that a span has.
  TESSERA_HD constexpr Range units_of(const SpanItem& item, int span) const {
    const int begin = span * length - item.start - fixed;
    return {max(min(begin, item.units), 0), max(min(begin + length, item.units), 0)};
  }
  friend constexpr bool operator==(const Spans&, const Spans&) = default;
};

/// Keys of both runs in tiles of `size`; no tile has keys of both.
struct KeyTiles {
  KeyRuns runs;
  int size = 1;

  TESSERA_HD constexpr int sinks() const { return ceil_div(runs.sinks.size(), size); }
  TESSERA_HD constexpr int count() const { return sinks() + ceil_div(runs.keys.size(), size); }
  /// From a tile's first key to the end of its run.
  TESSERA_HD constexpr Range from(int tile) const {
    const int first = sinks();
    if (tile < first) return {runs.sinks.begin + tile * size, runs.sinks.end};
    return {runs.keys.begin + (tile - first) * size, runs.keys.end};
  }
  /// In units of so many tiles: of an item that has all queries who see these keys, or of several
  /// that have some each. To some queries keys may be cut elsewhere between sink tokens and others
  /// than to all, which takes a tile more. unit_tiles: a number, or its Divisor.
  template <class Count>
  TESSERA_HD constexpr int units(const Count& unit_tiles, bool several,
                                 const SequenceMask& mask) const {
    const bool may_part = several && mask.sink_tokens > 0;
    return max(1, ceil_div(count() + (may_part ? 1 : 0), unit_tiles));
  }
};

}  // namespace tessera::core
