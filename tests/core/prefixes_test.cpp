// prefixes.h against literal loops over page tables: common keys of every run of neighbours, every
// key of a sequence in exactly one of its segments, and no prefix that does not pay.
#include "core/prefixes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace tessera::core {
namespace {

/// Rows of a page table, neighbours with common beginnings, and what each sequence has of it.
struct Tables {
  std::vector<std::vector<int>> pages;  ///< [batch][columns that may be shared]
  std::vector<int> seqlens, rows;       ///< keys; query rows of a key/value head
  int page_size = 1;

  int batch() const { return static_cast<int>(pages.size()); }
  std::size_t at(int b) const { return static_cast<std::size_t>(b); }
  /// Keys that sequences [first, end) have in common.
  int common(int first, int end) const {
    int columns = static_cast<int>(pages[at(first)].size());
    for (int b = first + 1; b < end; ++b) {
      const auto& one = pages[at(first)];
      const auto& other = pages[at(b)];
      const auto differs = std::mismatch(one.begin(), one.end(), other.begin(), other.end());
      columns = std::min(columns, static_cast<int>(differs.first - one.begin()));
    }
    return columns * page_size;
  }
  std::string text() const {
    std::string text = "pages of " + std::to_string(page_size) + ":";
    for (int b = 0; b < batch(); ++b) {
      text += " " + std::to_string(b == 0 ? 0 : common(b - 1, b)) + "/" +
              std::to_string(seqlens[at(b)]) + "x" + std::to_string(rows[at(b)]);
    }
    return text;
  }
};

Tables random_tables(std::mt19937& random) {
  const auto up_to = [&random](int high) {
    return static_cast<int>(random() % (static_cast<unsigned>(high) + 1));
  };
  Tables tables;
  tables.page_size = 1 + up_to(up_to(1) == 0 ? 3 : 200);
  const int batch = 1 + up_to(20), columns = up_to(up_to(1) == 0 ? 4 : 30);
  std::vector<int> row;
  for (int b = 0; b < batch; ++b) {
    // Some have the row before up to some column, or nothing, or all of it.
    const int same = std::min(up_to(columns + 2), static_cast<int>(row.size()));
    row.resize(static_cast<std::size_t>(up_to(3) == 0 ? 0 : same));
    while (static_cast<int>(row.size()) < columns) row.push_back(1000 * b + up_to(2));
    const int shared = up_to(3) == 0 ? up_to(columns) : columns;  // of the row
    tables.pages.emplace_back(row.begin(), row.begin() + shared);
    const int keys = static_cast<int>(tables.pages.back().size()) * tables.page_size;
    tables.seqlens.push_back(keys + up_to(300));
    tables.rows.push_back(up_to(5) == 0 ? 0 : 1 + up_to(up_to(2) == 0 ? 60 : 8));
  }
  return tables;
}

/// Calls body(tables) for random ones.
template <class Body>
void for_each_table(const Body& body) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  for (int trial = 0; trial < 1000; ++trial) {
    const Tables tables = random_tables(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + tables.text());
    body(tables);
    if (testing::Test::HasFailure()) return;
  }
}

std::vector<CommonKeys> list_of(const Tables& tables) {
  std::vector<CommonKeys> list(tables.at(tables.batch()));
  list.resize(tables.at(list_common_keys(
      tables.batch(), [&tables](int b) { return tables.common(b - 1, b + 1); },
      [&tables](int b) {  // some way there
        int next = b + 1;
        while (next < tables.batch() && next % 3 != 0 &&
               tables.common(next - 1, next + 1) == tables.common(next - 2, next)) {
          ++next;
        }
        return next;
      },
      list.data())));
  return list;
}

TEST(CommonKeys, EveryRunOfNeighboursIsListedOnceAndInnerOnesFirst) {
  for_each_table([](const Tables& tables) {
    const std::vector<CommonKeys> list = list_of(tables);
    std::vector<std::tuple<int, int, int>> expected, listed;
    for (int first = 0; first < tables.batch(); ++first) {
      for (int end = first + 2; end <= tables.batch(); ++end) {
        const int keys = tables.common(first, end);
        const bool more_before = first > 0 && tables.common(first - 1, end) == keys;
        const bool more_behind = end < tables.batch() && tables.common(first, end + 1) == keys;
        if (keys > 0 && !more_before && !more_behind) expected.emplace_back(first, end, keys);
      }
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
      listed.emplace_back(list[i].first, list[i].end, list[i].keys);
      for (std::size_t j = 0; j < i; ++j) {  // it is not inside of one that was listed before
        EXPECT_FALSE(list[j].first <= list[i].first && list[i].end <= list[j].end);
      }
    }
    std::sort(expected.begin(), expected.end());
    std::sort(listed.begin(), listed.end());
    EXPECT_EQ(listed, expected);
  });
}

/// What prefixes may be: how many of one another, and rows that read together.
struct Choice {
  int levels, block_m;
};

/// All segments, those of sequences first. Rows are packed.
std::vector<Segment> segments_of(const Tables& tables, const Choice& choice) {
  const std::vector<CommonKeys> list = list_of(tables);
  std::vector<OwnKeys> own(tables.at(tables.batch()));
  std::vector<Segment> prefixes, all;
  std::vector<std::int32_t> cu_seqlens = {0};
  for (const int rows : tables.rows) cu_seqlens.push_back(cu_seqlens.back() + rows);
  const PrefixRules rules = {.batch = tables.batch(),
                             .levels = choice.levels,
                             .heads = 3,
                             .unit_n = 48,
                             .spans = {.fixed = 2},
                             .rows = {cu_seqlens.data(), 0, 1, choice.block_m}};
  const ChosenPrefixes chosen =
      choose_prefixes(list.data(), static_cast<int>(list.size()), rules, own.data(),
                      [&prefixes](int i, const Segment& prefix) {
                        EXPECT_EQ(prefixes.size(), static_cast<std::size_t>(i));
                        prefixes.push_back(prefix);
                      });
  EXPECT_EQ(prefixes.size(), static_cast<std::size_t>(chosen.count));
  // Its items lie behind those of the prefixes before it.
  int cost = 0;
  for (const Segment& prefix : prefixes) {
    EXPECT_EQ(prefix.before, cost);
    for (int item = 0; item < 3 * prefix.blocks; ++item) {
      const SpanItem at = item_of(prefix, rules.spans, item / prefix.blocks, item % prefix.blocks,
                                  1000000, chosen.cost);
      EXPECT_EQ(at.start, 1000000 - chosen.cost + cost);
      EXPECT_EQ(at.units, (prefix.end - prefix.begin + 47) / 48);
      cost += rules.spans.cost(at.units);
    }
  }
  EXPECT_EQ(cost, chosen.cost);
  for (int b = 0; b < tables.batch(); ++b) {
    all.push_back(rest_of(b, tables.seqlens[tables.at(b)], own[tables.at(b)]));
  }
  all.insert(all.end(), prefixes.begin(), prefixes.end());
  return all;
}

constexpr Choice kChoices[] = {{1, 16}, {1, 64}, {2, 64}, {4, 16}};

TEST(Prefixes, EveryKeyOfASequenceLiesInOneSegmentAndAPrefixsPagesAreAllMembers) {
  for_each_table([](const Tables& tables) {
    for (const Choice& choice : kChoices) {
      const std::vector<Segment> segments = segments_of(tables, choice);
      EXPECT_LE(segments.size(), 2 * tables.pages.size());
      for (int b = 0; b < tables.batch(); ++b) {
        std::vector<int> covered(tables.at(tables.seqlens[tables.at(b)]));
        int levels = 0;
        for (const Segment& segment : segments) {
          if (b < segment.sequence || b >= segment.sequence + segment.count) continue;
          for (int key = segment.begin; key < segment.end; ++key) ++covered.at(tables.at(key));
          levels += segment.prefix ? 1 : 0;
        }
        EXPECT_EQ(std::count(covered.begin(), covered.end(), 1),
                  static_cast<std::ptrdiff_t>(covered.size()));
        EXPECT_LE(levels, choice.levels);
        EXPECT_EQ(segments[tables.at(b)].level, levels);
        // From its own keys outwards, one prefix begins where the next one ends.
        int begin = segments[tables.at(b)].begin;
        for (int i = segments[tables.at(b)].parent; i >= 0; i = segments[tables.at(i)].parent) {
          EXPECT_EQ(segments[tables.at(i)].end, begin);
          begin = segments[tables.at(i)].begin;
          --levels;
        }
        EXPECT_EQ(begin, 0);
        EXPECT_EQ(levels, 0);
      }
      for (const Segment& segment : segments) {
        if (!segment.prefix) continue;
        EXPECT_GE(tables.common(segment.sequence, segment.sequence + segment.count), segment.end);
      }
    }
  });
}

/// Row blocks that read keys less than without the prefix, against what a part more of every
/// sequence costs.
TEST(Prefixes, AreThoseThatPay) {
  std::size_t chosen = 0, left = 0;
  for_each_table([&](const Tables& tables) {
    const Choice choice = {4, 64};
    const std::vector<Segment> segments = segments_of(tables, choice);
    const auto saved = [&](int first, int end) {
      std::int64_t separate = 0, rows = 0;
      for (int b = first; b < end; ++b) {
        const std::int64_t of_one = tables.rows[tables.at(b)];
        separate += std::max<std::int64_t>((of_one + choice.block_m - 1) / choice.block_m, 1);
        rows += of_one;
      }
      return separate - (rows + choice.block_m - 1) / choice.block_m;
    };
    for (const CommonKeys& run : list_of(tables)) {
      int begin = 0;  // prefixes of more sequences
      bool there = false;
      for (const Segment& one : segments) {
        if (!one.prefix || one.sequence > run.first || one.sequence + one.count < run.end) continue;
        if (one.end == run.keys) there = true;
        if (one.end < run.keys) begin = std::max(begin, one.end);
      }
      const std::int64_t keys = run.keys - begin, sequences = run.end - run.first;
      const bool pays = keys * saved(run.first, run.end) > 64 * sequences;
      int levels = 0;
      for (const Segment& one : segments) {
        levels += one.prefix && one.sequence <= run.first && run.end <= one.sequence + one.count &&
                          one.end <= begin
                      ? 1
                      : 0;
      }
      EXPECT_EQ(there, pays && levels < choice.levels)
          << run.first << " to " << run.end << ", " << run.keys << " keys";
      ++(there ? chosen : left);
    }
  });
  EXPECT_GT(chosen, 0U);
  EXPECT_GT(left, 0U);
}

}  // namespace
}  // namespace tessera::core
