// spans.h against literal loops: every unit of every item lies in exactly one span, spans are
// alike, and parts lie so that two slots a span are enough and who merges waits for spans above its
// own; tiles of keys; rows of a group by a multiplication.
#include "core/spans.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/work.h"

namespace tessera::core {
namespace {

/// Items one after another, and how they are cut.
struct Line {
  Spans spans;
  std::vector<SpanItem> items;
  int total = 0;  ///< cost of all items

  std::string text() const {
    std::string units;
    for (const SpanItem& item : items) units += " " + std::to_string(item.units);
    return std::to_string(spans.count) + " spans, fixed " + std::to_string(spans.fixed) +
           ", least " + std::to_string(spans.least) + ", units" + units;
  }
};

Line random_line(std::mt19937& random) {
  const auto up_to = [&random](int high) {
    return static_cast<int>(random() % (static_cast<unsigned>(high) + 1));
  };
  Line line;
  line.spans.count = 1 + up_to(up_to(1) == 0 ? 5 : 40);
  line.spans.fixed = up_to(3);
  line.spans.least = 1 + up_to(3);
  const int items = 1 + up_to(20), most = up_to(3) == 0 ? 1 : 1 + up_to(60);
  for (int i = 0; i < items; ++i) {
    const SpanItem item = {line.total, 1 + up_to(most - 1)};
    line.items.push_back(item);
    line.total += line.spans.cost(item.units);
  }
  line.spans.cut(line.total);
  return line;
}

/// Calls body(line, owners) for random lines; owners[item][unit] is the span whose stretch of the
/// line has the unit, found position by position.
template <class Body>
void for_each_line(const Body& body) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  for (int trial = 0; trial < 500; ++trial) {
    const Line line = random_line(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + line.text());
    std::vector<std::vector<int>> owners;
    int position = 0;
    for (const SpanItem& item : line.items) {
      ASSERT_EQ(item.start, position);
      position += line.spans.fixed_of(item.units);
      owners.emplace_back();
      for (int unit = 0; unit < item.units; ++unit, ++position) {
        int owner = 0;
        while ((owner + 1) * line.spans.length <= position) ++owner;
        owners.back().push_back(owner);
      }
    }
    body(line, owners);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Spans, EveryUnitOfEveryItemIsInOneSpan) {
  int parted = 0, untouched = 0;
  for_each_line([&](const Line& line, const std::vector<std::vector<int>>& owners) {
    for (std::size_t i = 0; i < line.items.size(); ++i) {
      const SpanItem& item = line.items[i];
      for (int unit = 0; unit < item.units; ++unit) {
        const int owner = owners[i][static_cast<std::size_t>(unit)];
        ASSERT_LT(owner, line.spans.count);
        ASSERT_EQ(line.spans.span_of(item, unit), owner);
      }
      for (int span = 0; span < line.spans.count; ++span) {
        const Range units = line.spans.units_of(item, span);
        ASSERT_GE(units.begin, 0);
        ASSERT_LE(units.end, item.units);
        for (int unit = 0; unit < item.units; ++unit) {
          const bool has = units.begin <= unit && unit < units.end;
          ASSERT_EQ(has, owners[i][static_cast<std::size_t>(unit)] == span) << span << " " << unit;
        }
      }
      parted += owners[i].front() != owners[i].back() ? 1 : 0;
    }
    // The last spans have nothing where there is too little for all.
    untouched += line.total <= (line.spans.count - 1) * line.spans.length ? 1 : 0;
  });
  EXPECT_GT(parted, 100);
  EXPECT_GT(untouched, 10);
}

TEST(Spans, AreAlikeAndAsShortAsTheirNumberAllows) {
  for_each_line([&](const Line& line, const std::vector<std::vector<int>>& owners) {
    const int length = line.spans.length;
    ASSERT_GE(length, line.spans.least);
    ASSERT_TRUE(length == line.spans.least || (length - 1) * line.spans.count < line.total);
    std::vector<int> units(static_cast<std::size_t>(line.spans.count));
    for (const std::vector<int>& item : owners) {
      for (const int owner : item) ++units[static_cast<std::size_t>(owner)];
    }
    ASSERT_LE(*std::max_element(units.begin(), units.end()), length);
  });
}

/// What the slots of parts and the order of blocks rest on: of the items that have parts, a span
/// has the first part of at most one and another part of at most one; and parts follow each other
/// in spans that do, from the lowest, where the first is, to the one of the last unit.
TEST(Spans, HaveAtMostTwoPartsWhichFollowEachOther) {
  int both = 0;
  for_each_line([&](const Line& line, const std::vector<std::vector<int>>& owners) {
    const Spans& spans = line.spans;
    std::vector<int> firsts(static_cast<std::size_t>(spans.count)), others(firsts);
    for (std::size_t i = 0; i < line.items.size(); ++i) {
      const SpanItem& item = line.items[i];
      const int first = spans.span_of(item, 0), last = spans.span_of(item, item.units - 1);
      ASSERT_EQ(first, owners[i].front());
      ASSERT_EQ(last, owners[i].back());
      int end = 0;  // of the parts so far
      for (int span = 0; span < spans.count; ++span) {
        const Range units = spans.units_of(item, span);
        ASSERT_EQ(units.empty(), span < first || span > last) << span;
        if (units.empty()) continue;
        ASSERT_EQ(units.begin, end) << span;
        end = units.end;
        if (first != last) ++(units.begin == 0 ? firsts : others)[static_cast<std::size_t>(span)];
      }
      ASSERT_EQ(end, item.units);
    }
    for (std::size_t span = 0; span < firsts.size(); ++span) {
      ASSERT_LE(firsts[span], 1) << span;
      ASSERT_LE(others[span], 1) << span;
      both += firsts[span] == 1 && others[span] == 1 ? 1 : 0;
    }
  });
  EXPECT_GT(both, 100);
}

// To a block of queries keys may be cut between sink tokens and others where they are not to all
// queries, which takes a tile more.
TEST(KeyTiles, NoBlockOfQueriesHasMoreTilesThanItsItemHasRoomFor_S3) {
  const int seqlen_q = 9;
  int apart = 0, moved = 0;  // none are apart to all queries; others are
  for (int seqlen_k = 1; seqlen_k <= 40; ++seqlen_k) {
    for (int sink_tokens = 0; sink_tokens <= 14; ++sink_tokens) {
      for (int left = 0; left <= 12; ++left) {
        for (const int right : {0, seqlen_k}) {
          for (const int offset : {0, seqlen_k - seqlen_q}) {
            const SequenceMask mask = {
                {seqlen_q, seqlen_k, left, right, offset}, Divisor(0), sink_tokens};
            const KeyTiles all = {mask.runs_of({0, seqlen_q}), 4};
            for (int query = 0; query < seqlen_q; query += 3) {
              const KeyTiles block = {mask.runs_of({query, query + 3}), 4};
              for (int unit_tiles = 1; unit_tiles <= 3; ++unit_tiles) {
                ASSERT_LE(ceil_div(block.count(), unit_tiles), all.units(unit_tiles, true, mask))
                    << seqlen_k << " " << sink_tokens << " " << left << " " << right << " "
                    << offset << " " << query;
                if (ceil_div(block.count(), unit_tiles) > all.units(unit_tiles, false, mask)) {
                  ++(all.runs.sinks.empty() ? apart : moved);
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(apart, 0);
  EXPECT_GT(moved, 0);
}

TEST(KeyTiles, HaveEveryKeyOfBothRunsOnce) {
  for (int sinks = 0; sinks <= 9; ++sinks) {
    for (int gap = 0; gap <= 3; ++gap) {
      for (int count = 0; count <= 9; ++count) {
        for (int size = 1; size <= 5; ++size) {
          const int begin = sinks + gap;
          const KeyTiles tiles = {{{0, sinks}, {begin, begin + count}}, size};
          std::vector<int> keys, expected;
          for (int tile = 0; tile < tiles.count(); ++tile) {
            const Range rest = tiles.from(tile);
            ASSERT_FALSE(rest.empty());
            ASSERT_EQ(rest.end, tile < tiles.sinks ? sinks : begin + count);
            for (int key = rest.begin; key < min(rest.begin + size, rest.end); ++key) {
              keys.push_back(key);
            }
          }
          for (int key = 0; key < begin + count; ++key) {
            if (key < sinks || key >= begin) expected.push_back(key);
          }
          ASSERT_EQ(keys, expected) << sinks << " " << gap << " " << count << " " << size;
          for (int unit_tiles = 1; unit_tiles <= 4; ++unit_tiles) {
            int units = 0;
            for (int tile = 0; tile < tiles.count(); tile += unit_tiles) ++units;
            ASSERT_EQ(tiles.units(unit_tiles, false, {}), max(units, 1));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::core
