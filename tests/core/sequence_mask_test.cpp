// S2, S3: chunks, sink tokens and trees against the definition, for every small mask and every run
// of queries; and the runs of keys that kernels walk over, cut into blocks and splits.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>
#include <vector>

#include "core/work.h"

namespace tessera::core {
namespace {

/// A mask and what it was made of.
struct Case {
  int seqlen_q = 0, seqlen_k = 0, left = -1, right = -1;
  Alignment alignment = Alignment::bottom_right;
  int chunk = 0, sink_tokens = 0;
  const std::uint64_t* tree = nullptr;
  unsigned seed = 0;  ///< of the tree

  SequenceMask mask() const {
    return {make_band(seqlen_q, seqlen_k, left, right, alignment), Divisor(chunk), sink_tokens,
            tree};
  }
  int position(int i) const {
    return alignment == Alignment::bottom_right ? i + seqlen_k - seqlen_q : i;
  }
  /// The definition, word by word from S3; tree and sink tokens aside.
  bool in_window(int i, int j) const {
    const int p = position(i);
    if (j < 0 || j >= seqlen_k) return false;
    if (left >= 0 && j < p - left) return false;
    if (right >= 0 && j > p + right) return false;
    if (chunk == 0) return true;
    int begin = 0;  // of p's chunk
    while (begin > p) begin -= chunk;
    while (begin + chunk <= p) begin += chunk;
    return begin <= j && j < begin + chunk;
  }
  /// A sink token is seen if something at or behind its left end would be.
  bool sees(int i, int j) const {
    const int p = position(i), bit = j - (seqlen_k - seqlen_q);
    if (tree != nullptr && bit >= 0 && (tree[i] >> bit & 1) == 0) return false;
    if (in_window(i, j)) return true;
    if (j >= sink_tokens || (right >= 0 && j > p + right)) return false;
    return chunk == 0 || j / chunk * chunk <= p;
  }
  std::string text() const {
    return "q " + std::to_string(seqlen_q) + " k " + std::to_string(seqlen_k) + " window " +
           std::to_string(left) + "," + std::to_string(right) +
           (alignment == Alignment::top_left ? " tl" : "") + " chunk " + std::to_string(chunk) +
           " sink_tokens " + std::to_string(sink_tokens) +
           (tree != nullptr ? " tree, seed " + std::to_string(seed) : "");
  }
};

/// Calls body(case) for every small mask, with and without random words of a tree.
template <class Body>
void for_each_case(const Body& body) {
  const unsigned seed = std::random_device{}();
  std::mt19937_64 random(seed);
  std::array<std::uint64_t, 5> words{};
  const std::array<std::array<int, 2>, 9> sizes = {
      {{1, 7}, {5, 7}, {5, 5}, {5, 3}, {4, 1}, {2, 6}, {3, 0}, {0, 3}, {1, 1}}};
  for (const auto& [sq, sk] : sizes) {
    for (int window = 0; window < 25; ++window) {
      for (const int chunk : {0, 1, 2, 3, 6, 100}) {
        for (const int sink_tokens : {0, 1, 2, 5, 100}) {
          for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
            for (const bool tree : {false, true}) {
              for (std::uint64_t& word : words) word = random();
              body(Case{sq, sk, window / 5 - 1, window % 5 - 1, alignment, chunk, sink_tokens,
                        tree ? words.data() : nullptr, seed});
            }
          }
        }
      }
    }
  }
}

std::vector<int> list_of(const KeyRuns& runs) {
  std::vector<int> keys;
  for (const Range run : {runs.sinks, runs.keys}) {
    for (int j = run.begin; j < run.end; ++j) keys.push_back(j);
  }
  return keys;
}

TEST(SequenceMask, VisibleIsTheDefinition_S2_S3) {
  std::int64_t visible = 0;
  for_each_case([&visible](const Case& c) {
    const SequenceMask mask = c.mask();
    for (int i = 0; i < c.seqlen_q; ++i) {
      for (int j = 0; j < c.seqlen_k; ++j) {
        ASSERT_EQ(mask.visible(i, j), c.sees(i, j)) << c.text() << " i " << i << " j " << j;
        visible += c.sees(i, j) ? 1 : 0;
      }
    }
    ASSERT_EQ(mask.special(), c.chunk != 0 || c.sink_tokens != 0 || c.tree != nullptr);
  });
  EXPECT_GT(visible, 50'000);
}

/// No key that a query sees is left out, no run is longer than what its queries see of it, and the
/// keys said to be common are.
TEST(SequenceMask, RunsOfKeysAreTight) {
  for_each_case([](const Case& c) {
    const SequenceMask mask = c.mask();
    for (int begin = 0; begin < c.seqlen_q; ++begin) {
      for (int end = begin + 1; end <= c.seqlen_q; ++end) {
        const auto where = [&] {
          return c.text() + " queries " + std::to_string(begin) + ".." + std::to_string(end);
        };
        std::vector<int> window, all, common;
        Case open = c;  // what the tree hides lies in the runs
        open.tree = nullptr;
        for (int j = 0; j < c.seqlen_k; ++j) {
          int in_window = 0, seen = 0;
          for (int i = begin; i < end; ++i) {
            in_window += c.in_window(i, j) ? 1 : 0;
            seen += open.sees(i, j) ? 1 : 0;
          }
          if (in_window > 0) window.push_back(j);
          if (seen > 0) all.push_back(j);
          const bool below_tree = c.tree == nullptr || j < c.seqlen_k - c.seqlen_q;
          if (in_window == end - begin && below_tree) common.push_back(j);
        }
        const Range keys = mask.keys_of(Range{begin, end});
        ASSERT_EQ(keys, (window.empty() ? Range{0, 0} : Range{window.front(), window.back() + 1}))
            << where();
        const KeyRuns runs = mask.runs_of({begin, end});
        ASSERT_EQ(runs.keys, keys) << where();
        ASSERT_TRUE(runs.sinks.empty() || runs.keys.empty() || runs.sinks.end <= runs.keys.begin)
            << where();
        // Between the first and the last of the window nothing is missing.
        std::vector<int> expected;
        for (const int j : all) {
          if (keys.empty() || j < keys.begin) expected.push_back(j);
        }
        for (int j = keys.begin; j < keys.end; ++j) expected.push_back(j);
        ASSERT_EQ(list_of(runs), expected) << where();
        const Range shared = mask.common_keys({begin, end});
        ASSERT_EQ(shared, (common.empty() ? Range{0, 0} : Range{common.front(), common.back() + 1}))
            << where();
      }
    }
  });
}

TEST(SequenceMask, HugeLengthsDoNotOverflow) {
  constexpr int kLong = 1 << 29, kMost = 1 << 30;
  for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
    const SequenceMask mask{make_band(kLong, kLong, -1, -1, alignment), Divisor(kMost), kMost,
                            nullptr};
    EXPECT_EQ(mask.keys_of(Range{0, kLong}), (Range{0, kLong}));
    EXPECT_EQ(mask.runs_of({kLong - 1, kLong}).size(), kLong);
    const SequenceMask few{make_band(kLong, 1, -1, 0, alignment), Divisor(kMost), 0, nullptr};
    EXPECT_EQ(few.keys_of(kLong - 1), (Range{0, 1}));
    EXPECT_EQ(few.keys_of(0).empty(), alignment == Alignment::bottom_right);
  }
}

/// Calls body(runs) for every pair of short runs, one after another, empty ones too.
template <class Body>
void for_each_runs(const Body& body) {
  for (int sinks = 0; sinks <= 4; ++sinks) {
    for (int gap = 0; gap <= 3; ++gap) {
      for (int keys = 0; keys <= 7; ++keys) {
        const int begin = sinks + gap;
        body(KeyRuns{{0, sinks}, keys == 0 ? Range{0, 0} : Range{begin, begin + keys}});
      }
    }
  }
}

/// Blocks of some of the runs: all their keys in order, no block across the gap, none shorter than
/// asked for but the last of a run.
void expect_walk(const KeyRuns& runs) {
  for (int count = 1; count <= 9; ++count) {
    std::vector<int> walked;
    for (Range block = runs.first(count); !block.empty(); block = runs.after(block, count)) {
      ASSERT_LE(block.size(), count);
      if (block.size() < count) {
        ASSERT_TRUE(block.end == runs.sinks.end || block.end == runs.keys.end);
      }
      for (int j = block.begin; j < block.end; ++j) walked.push_back(j);
      ASSERT_LE(walked.size(), 20U);
    }
    ASSERT_EQ(walked, list_of(runs)) << count;
  }
}

TEST(KeyRuns, BlocksAndPartsAreTheKeysInOrder) {
  for_each_runs([](const KeyRuns& runs) {
    const std::vector<int> keys = list_of(runs);
    ASSERT_EQ(static_cast<std::size_t>(runs.size()), keys.size());
    ASSERT_EQ(runs.empty(), keys.empty());
    expect_walk(runs);
    for (int begin = 0; begin <= runs.size(); ++begin) {
      for (int end = begin; end <= runs.size(); ++end) {
        const KeyRuns part = runs.part(begin, end);
        ASSERT_EQ(list_of(part), std::vector<int>(keys.begin() + begin, keys.begin() + end))
            << runs.sinks.end << " " << runs.keys.begin << ".." << runs.keys.end << " part "
            << begin << ".." << end;
        expect_walk(part);
      }
    }
  });
}

/// What a sub-tile takes of an item: no key that it has not, and all that both have; of sink tokens
/// that are to the item sink tokens or other keys.
TEST(KeyRuns, OfASubTileAreAmongItsItems) {
  for_each_runs([](const KeyRuns& item) {
    const std::vector<int> items = list_of(item);
    for_each_runs([&](const KeyRuns& own) {
      if (own.sinks.end < item.sinks.end) return;  // its queries are among the item's, or later
      const std::vector<int> taken = list_of(own.among(item));
      EXPECT_TRUE(std::includes(items.begin(), items.end(), taken.begin(), taken.end()));
      std::vector<int> both;
      const std::vector<int> owns = list_of(own);
      std::set_intersection(items.begin(), items.end(), owns.begin(), owns.end(),
                            std::back_inserter(both));
      EXPECT_TRUE(std::includes(taken.begin(), taken.end(), both.begin(), both.end()));
      if (own.sinks.end <= item.keys.begin) {
        EXPECT_EQ(taken, both);
      }
    });
  });
}

/// Splits are the keys in order, each of split_n keys but the last; as many as are said to be used
/// have some, and the first exists in any case.
TEST(KeyRuns, SplitsAreTheKeysInOrder) {
  for_each_runs([](const KeyRuns& runs) {
    ASSERT_EQ(split_runs(runs, 0, 0), runs);
    ASSERT_EQ(used_splits(runs, 0), 1);
    for (int split_n = 1; split_n <= 12; ++split_n) {
      std::vector<int> together;
      int used = 0;
      for (int split = 0; split < 14; ++split) {
        const KeyRuns part = split_runs(runs, split, split_n);
        const std::vector<int> keys = list_of(part);
        together.insert(together.end(), keys.begin(), keys.end());
        ASSERT_EQ(keys.size(),
                  static_cast<std::size_t>(max(0, min(split_n, runs.size() - split * split_n))));
        used += keys.empty() ? 0 : 1;
      }
      ASSERT_EQ(together, list_of(runs));
      ASSERT_EQ(used_splits(runs, split_n), max(used, 1));
    }
  });
}

}  // namespace
}  // namespace tessera::core
