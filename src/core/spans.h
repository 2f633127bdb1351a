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
  int fixed = 0;   ///< cost of a short item besides its units
  int least = 1;   ///< no span is shorter
  int length = 1;  ///< of every span, but the last ones; cut() sets it

  /// In a long item the fixed part is not worth cuts that are less even for it.
  static constexpr int kLong = 16;
  TESSERA_HD constexpr int fixed_of(int units) const { return units < kLong ? fixed : 0; }
  TESSERA_HD constexpr int cost(int units) const { return fixed_of(units) + units; }
  /// total: the cost of all items. by: `count`, or its Divisor.
  template <class Count>
  TESSERA_HD constexpr void cut(int total, const Count& by) {
    length = max(ceil_div(total, by), least);
  }
  TESSERA_HD constexpr void cut(int total) { cut(total, count); }
  /// The span that has a unit of the item.
  TESSERA_HD constexpr int span_of(const SpanItem& item, int unit) const {
    return (item.start + fixed_of(item.units) + unit) / length;
  }
  /// The item's units that a span has.
  TESSERA_HD constexpr Range units_of(const SpanItem& item, int span) const {
    const int begin = span * length - item.start - fixed_of(item.units);
    return {max(min(begin, item.units), 0), max(min(begin + length, item.units), 0)};
  }
  friend constexpr bool operator==(const Spans&, const Spans&) = default;
};

/// Which parts of an item take in which others: part i those from i + 1 to i + 7 if 8 divides i,
/// with all that they have taken in, then parts i + 8, i + 16 to i + 56 if 64 does, and so on. Part
/// 0 ends with all of them.
struct PartTree {
  static constexpr int kShift = 3, kOthers = (1 << kShift) - 1;
  int parts = 1;

  /// How many others, 2^shift apart, a part takes in; shift: 0, and more by kShift each time, until
  /// there are none.
  TESSERA_HD constexpr int others(int part, int shift) const {
    return (part >> shift & kOthers) == 0 ? min((parts - 1 - part) >> shift, kOthers) : 0;
  }
};

/// What a span leaves of an item for another one: two neighbouring columns of a row's normalised
/// output, and the row's natural-log lse. 16 bytes, which come and go as one; `ticket` says whose.
/// Rows with qv leave other things in as much (cuda/sm90/latent_results.h).
struct alignas(16) PartWord {
  float x[2];
  float lse;
  std::uint32_t ticket;
};

/// Keys of both runs in tiles of `size`; no tile has keys of both.
struct KeyTiles {
  KeyRuns runs;
  int size = 1;
  int sinks = 0;  ///< tiles of the first run

  constexpr KeyTiles() = default;
  TESSERA_HD constexpr KeyTiles(const KeyRuns& of, int each)
      : runs(of), size(each), sinks(ceil_div(of.sinks.size(), each)) {}

  TESSERA_HD constexpr int count() const { return sinks + ceil_div(runs.keys.size(), size); }
  /// From a tile's first key to the end of its run.
  TESSERA_HD constexpr Range from(int tile) const {
    if (tile < sinks) return {runs.sinks.begin + tile * size, runs.sinks.end};
    return {runs.keys.begin + (tile - sinks) * size, runs.keys.end};
  }
  /// Tiles of the second run whose keys all lie in `keys`.
  TESSERA_HD constexpr Range inside(const Range& keys) const {
    const int begin = max(keys.begin - runs.keys.begin, 0);
    const int end = min(keys.end, runs.keys.end) - runs.keys.begin;
    return {sinks + ceil_div(begin, size), sinks + max(end, 0) / size};
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
