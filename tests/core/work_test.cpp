// S10 and work.h: every (batch, head, query) belongs to exactly one work item, splits cover the
// visible keys exactly once, rows map to queries and heads one to one, and blocks are said
// to be seen and full where they are.
#include "core/work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace tessera::core {
namespace {

TEST(Rows, AreQueriesAndHeadsOneToOne_S10) {
  for (const int group : {1, 2, 3, 8}) {
    const Rows rows{11, group};
    std::set<std::pair<int, int>> seen;
    for (std::int64_t r = 0; r < rows.count(); ++r) {
      EXPECT_TRUE(seen.insert({rows.query_of(r), rows.member_of(r)}).second);
      EXPECT_LT(rows.query_of(r), 11);
      EXPECT_LT(rows.member_of(r), group);
    }
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(11 * group));
    for (std::int64_t begin = 0; begin < rows.count(); ++begin) {
      for (std::int64_t end = begin + 1; end <= rows.count(); ++end) {
        const Range queries = rows.queries_of(begin, end);
        EXPECT_EQ(queries.begin, rows.query_of(begin));
        EXPECT_EQ(queries.end, rows.query_of(end - 1) + 1);
      }
    }
  }
  EXPECT_TRUE((Rows{5, 2}.queries_of(3, 3).empty()));
}

/// Every (band, run of queries, block size) of small sizes: no block that is seen is left out, none
/// that nobody sees is visited, and "full" is said exactly where no mask is needed.
TEST(KeyBlocks, AgreeWithEveryPair_S2_S3) {
  for (const auto& [seqlen_q, seqlen_k] :
       {std::pair{7, 7}, {5, 9}, {9, 5}, {1, 8}, {8, 1}, {3, 0}}) {
    for (int left = -1; left <= 6; ++left) {
      for (int right = -1; right <= 6; ++right) {
        for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
          const Band band = make_band(seqlen_q, seqlen_k, left, right, alignment);
          for (int begin = 0; begin < seqlen_q; ++begin) {
            for (int end = begin + 1; end <= seqlen_q; ++end) {
              for (const int block_n : {1, 2, 3, 4}) {
                const KeyBlocks blocks = key_blocks(band, {begin, end}, block_n);
                for (int n = 0; n <= seqlen_k / block_n + 1; ++n) {
                  int visible = 0;
                  for (int i = begin; i < end; ++i) {
                    for (int j = n * block_n; j < (n + 1) * block_n; ++j) {
                      visible += j < seqlen_k && band.visible(i, j) ? 1 : 0;
                    }
                  }
                  const bool seen = blocks.seen.begin <= n && n < blocks.seen.end;
                  const bool full = blocks.full.begin <= n && n < blocks.full.end;
                  ASSERT_EQ(seen, visible > 0) << n;
                  ASSERT_EQ(full, visible == (end - begin) * block_n) << n;
                }
              }
            }
          }
        }
      }
    }
  }
}

/// The same of runs of keys, which may end beyond the sequence as a block of keys does.
TEST(QueryBlocks, AgreeWithEveryPair_S2_S3) {
  for (const auto& [seqlen_q, seqlen_k] :
       {std::pair{7, 7}, {5, 9}, {9, 5}, {1, 8}, {8, 1}, {0, 3}}) {
    for (int left = -1; left <= 6; ++left) {
      for (int right = -1; right <= 6; ++right) {
        for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
          const Band band = make_band(seqlen_q, seqlen_k, left, right, alignment);
          for (int begin = 0; begin < seqlen_k; ++begin) {
            for (int end = begin + 1; end <= seqlen_k + 2; ++end) {
              for (const int block_m : {1, 2, 3, 4}) {
                const QueryBlocks blocks = query_blocks(band, {begin, end}, block_m);
                for (int m = 0; m <= seqlen_q / block_m + 1; ++m) {
                  int visible = 0;
                  for (int i = m * block_m; i < (m + 1) * block_m; ++i) {
                    for (int j = begin; j < end; ++j) {
                      visible += i < seqlen_q && j < seqlen_k && band.visible(i, j) ? 1 : 0;
                    }
                  }
                  const bool seen = blocks.seen.begin <= m && m < blocks.seen.end;
                  const bool full = blocks.full.begin <= m && m < blocks.full.end;
                  ASSERT_EQ(seen, visible > 0) << m;
                  ASSERT_EQ(full, visible == (end - begin) * block_m) << m;
                }
                ASSERT_GE(blocks.seen.begin, 0);
                ASSERT_LE(blocks.seen.end, ceil_div(seqlen_q, block_m));
              }
            }
          }
        }
      }
    }
  }
}

/// What finishes a block of rows waits for as many key blocks as key_blocks says, what walks over
/// rows goes by query_blocks: one more or less, and it would wait for ever, or not long enough.
/// What begins a block of rows asks the band whether there are any.
TEST(QueryBlocks, MeetARowBlockAsOftenAsItMeetsKeyBlocks_S2_S3) {
  for (int seqlen_q = 0; seqlen_q <= 9; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k <= 9; ++seqlen_k) {
      for (int left = -1; left <= 6; ++left) {
        for (int right = -1; right <= 6; ++right) {
          for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
            const Band band = make_band(seqlen_q, seqlen_k, left, right, alignment);
            for (const auto& [block_m, block_n] :
                 {std::pair{1, 1}, {1, 3}, {2, 2}, {2, 4}, {3, 2}, {4, 1}, {4, 4}, {10, 10}}) {
              std::vector<int> met(static_cast<std::size_t>(ceil_div(seqlen_q, block_m)));
              for (int first = 0; first < seqlen_k; first += block_n) {
                const Range seen = query_blocks(band, {first, first + block_n}, block_m).seen;
                ASSERT_TRUE(seen.empty() || seen.end <= static_cast<int>(met.size()));
                for (int m = seen.begin; m < seen.end; ++m) ++met[static_cast<std::size_t>(m)];
              }
              for (int first = 0; first < seqlen_q; first += block_m) {
                const Range rows = {first, min(first + block_m, seqlen_q)};
                ASSERT_EQ(met[static_cast<std::size_t>(first / block_m)],
                          key_blocks(band, rows, block_n).seen.size())
                    << seqlen_q << " x " << seqlen_k << " in " << block_m << " x " << block_n
                    << " window " << left << ", " << right << " rows from " << first;
                ASSERT_EQ(met[static_cast<std::size_t>(first / block_m)] == 0,
                          band.keys_of(rows).empty());
              }
            }
          }
        }
      }
    }
  }
}

TEST(ShiftedRows, AreRowsOfAPowerOfTwo_S10) {
  for (int shift = 0; shift <= 6; ++shift) {
    const Rows rows{50, 1 << shift};
    const ShiftedRows shifted{shift};
    for (int begin = 0; begin < rows.count(); ++begin) {
      EXPECT_EQ(shifted.query_of(begin), rows.query_of(begin));
      EXPECT_EQ(shifted.member_of(begin), rows.member_of(begin));
      const int end = std::min(begin + 64, static_cast<int>(rows.count()));
      EXPECT_EQ(shifted.queries_of({begin, end}), rows.queries_of(begin, end));
    }
  }
}

/// Every piece exactly once, whoever takes it; in a section blocks come late ones first, and the
/// splits of a block follow each other. In 32 bits as in 64.
TEST(WorkOrder, EveryPieceOnceAndLongestFirstInASection) {
  std::mt19937 random(std::random_device{}());
  for (int batch = 1; batch <= 3; ++batch) {
    for (int heads = 1; heads <= 3; ++heads) {
      for (int section = 1; section <= batch * heads + 1; ++section) {
        const int blocks = 1 + static_cast<int>(random() % 4);
        const int splits = 1 + static_cast<int>(random() % 3);
        const WorkOrder order{
            .batch = batch, .heads = heads, .blocks = blocks, .splits = splits, .section = section};
        const int count = order.count<int>();
        ASSERT_EQ(count, batch * heads * blocks * splits);
        ASSERT_EQ(order.count(), count);
        for (const int workers : {1, 3, 5}) {
          std::set<std::tuple<int, int, int, int>> seen;
          for (int i = 0; i * workers < count; ++i) {
            for (int worker = 0; worker < workers; ++worker) {
              const int index = WorkOrder::index_of(i, worker, workers);
              ASSERT_GE(index, i * workers);
              ASSERT_LT(index, (i + 1) * workers);
              if (index >= count) continue;
              const Work work = order.at(index);
              ASSERT_TRUE(seen.insert({work.batch, work.head, work.block, work.split}).second);
              ASSERT_TRUE(0 <= work.batch && work.batch < batch);
              ASSERT_TRUE(0 <= work.head && work.head < heads);
              ASSERT_TRUE(0 <= work.block && work.block < blocks);
              ASSERT_TRUE(0 <= work.split && work.split < splits);
              const Work same = order.at(std::int64_t{index});
              ASSERT_TRUE(same.batch == work.batch && same.head == work.head &&
                          same.block == work.block && same.split == work.split);
            }
          }
          ASSERT_EQ(seen.size(), static_cast<std::size_t>(count));
        }
        for (int index = 1; index < count; ++index) {
          const Work work = order.at(index), before = order.at(index - 1);
          if (index % splits != 0) {
            ASSERT_EQ(work.split, before.split + 1);
            ASSERT_TRUE(work.batch == before.batch && work.head == before.head &&
                        work.block == before.block);
            continue;
          }
          const int sections = std::max(1, batch * heads / section);
          const auto section_of = [&](const Work& at) {
            return std::min((at.batch * heads + at.head) / section, sections - 1);
          };
          if (section_of(work) == section_of(before)) {
            ASSERT_LE(work.block, before.block);
          } else {
            ASSERT_EQ(section_of(work), section_of(before) + 1);
          }
        }
      }
    }
  }
}

/// Splits of rows are taken as so many more heads would be.
TEST(WorkOrder, SplitsOfRowsTakeTurnsAsHeads) {
  std::mt19937 random(std::random_device{}());
  for (int trial = 0; trial < 200; ++trial) {
    const auto up_to = [&](int most) {
      return 1 + static_cast<int>(random() % static_cast<unsigned>(most));
    };
    const int batch = up_to(3), heads = up_to(4), blocks = up_to(5), splits = up_to(6);
    const int section = up_to(batch * heads * splits);
    const WorkOrder order{
        .batch = batch, .heads = heads, .blocks = blocks, .splits = splits, .section = section};
    const WorkOrder same{
        .batch = batch, .heads = heads * splits, .blocks = blocks, .section = section};
    ASSERT_EQ(order.count(), same.count());
    for (int index = 0; index < order.count<int>(); ++index) {
      const Work work = order.backward_at(index), as = same.at(index);
      ASSERT_EQ(work.batch, as.batch);
      ASSERT_EQ(work.head * splits + work.split, as.head);
      ASSERT_EQ(work.block, as.block);
      ASSERT_LT(work.split, splits);
    }
  }
}

/// Each block of rows of each query head is one split's, in order, and no split has two more than
/// another.
TEST(RowSteps, SplitsShareOutAllBlocksOfAllHeads) {
  std::mt19937 random(std::random_device{}());
  for (int trial = 0; trial < 500; ++trial) {
    const int begin = static_cast<int>(random() % 20), size = static_cast<int>(random() % 9);
    const int group = 1 + static_cast<int>(random() % 5);
    const int splits = 1 + static_cast<int>(random() % 7);
    std::vector<std::pair<int, int>> taken, all;
    for (int member = 0; member < group; ++member) {
      for (int i = 0; i < size; ++i) all.emplace_back(member, begin + i);
    }
    int least = group * size, most = 0;
    for (int split = 0; split < splits; ++split) {
      const RowSteps steps = row_steps({begin, begin + size}, group, split, splits);
      for (int i = 0; i < steps.count; ++i) {
        taken.emplace_back(steps.at(i).member, steps.at(i).block);
      }
      least = std::min(least, steps.count);
      most = std::max(most, steps.count);
    }
    ASSERT_EQ(taken, all);
    ASSERT_LE(most, least + 1);
  }
}

/// A CPU's plan may have more pieces than 32 bits count.
TEST(WorkOrder, CountsBeyond32Bits) {
  const WorkOrder order{.batch = 1 << 20,
                        .heads = 1 << 10,
                        .blocks = 1 << 10,
                        .splits = 2,
                        .section = std::int64_t{1} << 30};
  const std::int64_t last = order.count() - 1;
  EXPECT_EQ(order.count(), std::int64_t{1} << 41);
  const Work work = order.at(last);
  EXPECT_EQ(work.batch, (1 << 20) - 1);
  EXPECT_EQ(work.head, (1 << 10) - 1);
  EXPECT_EQ(work.block, 0);
  EXPECT_EQ(work.split, 1);
}

TEST(WorkOrder, KeyBlocksAreTakenInTheOrderInWhichTheyAdd) {
  const WorkOrder order{.blocks = 5};
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(order.key_block(order.at(i), true), 4 - i);
    EXPECT_EQ(order.key_block(order.at(i), false), i);
  }
}

/// The last heads begin with early keys, in a section of their own after all others; and every
/// piece is there once.
TEST(WorkOrder, EarlyHeadsAreTheLastAndBeginWithEarlyKeys) {
  std::mt19937 random(std::random_device{}());
  for (int trial = 0; trial < 300; ++trial) {
    const auto up_to = [&](int most) {
      return 1 + static_cast<int>(random() % static_cast<unsigned>(most));
    };
    const int batch = up_to(3), heads = up_to(4), blocks = up_to(5), all = batch * heads;
    const int early = up_to(all), late = all - early;
    const WorkOrder order{
        .batch = batch, .heads = heads, .blocks = blocks, .early = early, .section = up_to(all)};
    std::set<std::pair<int, int>> seen;
    std::vector<int> next(static_cast<std::size_t>(all));
    for (int index = 0; index < order.count<int>(); ++index) {
      const Work work = order.backward_at(index);
      const int head = work.batch * heads + work.head;
      ASSERT_TRUE(0 <= work.head && work.head < heads && 0 <= head && head < all);
      ASSERT_EQ(work.early, head >= late);
      ASSERT_EQ(work.early, index >= late * blocks);
      ASSERT_EQ(work.split, 0);
      // Those of a head follow each other in the order in which they add.
      const int place = next[static_cast<std::size_t>(head)]++;
      ASSERT_EQ(order.key_block(work, true), work.early ? place : blocks - 1 - place);
      if (work.early) {
        ASSERT_EQ(head - late, (index - late * blocks) % early);
      }
      ASSERT_TRUE(seen.insert({head, work.block}).second);
    }
    ASSERT_EQ(seen.size(), static_cast<std::size_t>(all * blocks));
  }
}

/// A walk goes over the same rows, full ones among them, either way.
TEST(RowWalk, FromTheEndIsTheSameTheOtherWayRound) {
  const QueryBlocks blocks = {{3, 11}, {5, 8}};
  const RowWalk late = row_walk(blocks.seen, false), early = row_walk(blocks.seen, true);
  const QueryBlocks places = early.places_of(blocks);
  EXPECT_EQ(places.seen, blocks.seen);
  for (int place = 3; place < 11; ++place) {
    EXPECT_EQ(late.block_at(place), place);
    const int block = early.block_at(place);
    EXPECT_EQ(block, 13 - place);
    EXPECT_EQ(places.full.begin <= place && place < places.full.end, 5 <= block && block < 8);
  }
  EXPECT_EQ(late.places_of(blocks).full, blocks.full);
  EXPECT_EQ(late.rank_of({2, 9}, 8), 0);
  EXPECT_EQ(early.rank_of({2, 9}, 8), 6);
}

/// Every split of every head is in one piece, and those of the same heads follow each other.
TEST(DecodeOrder, HasEverySplitOfEveryHeadOnce) {
  for (const int heads : {1, 4, 7}) {
    for (const int width : {1, 2, 4, 9}) {
      const DecodeOrder order{3, heads, 5, width};
      std::set<std::tuple<int, int, int>> seen;
      for (std::int64_t i = 0; i < order.count(); ++i) {
        const DecodeOrder::Piece piece = order.at(i);
        EXPECT_EQ(piece.split, i % 5);
        EXPECT_LE(piece.heads, width);
        for (int head = piece.head; head < piece.head + piece.heads; ++head) {
          EXPECT_TRUE(seen.insert({piece.batch, head, piece.split}).second);
          EXPECT_LT(head, heads);
        }
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(3 * heads * 5));
    }
  }
  EXPECT_EQ((DecodeOrder{0, 4, 1, 2}.count()), 0);
}

/// A head's rows are prepared before its blocks of keys are taken, both of all heads of a wave
/// before those of the next one.
TEST(BackwardOrder, GoesByWaves) {
  for (const int heads : {1, 5, 12}) {
    for (const int wave : {1, 4, 5, 20}) {
      const BackwardOrder order{heads, wave, 3, 2};
      std::vector<std::int64_t> next(static_cast<std::size_t>(heads));
      std::int64_t begun = 0;  // waves
      for (std::int64_t i = 0; i < order.count(); ++i) {
        const BackwardOrder::Piece piece = order.at(i);
        EXPECT_EQ(piece.number, next[static_cast<std::size_t>(piece.head)]++);
        EXPECT_GE(piece.head / wave, begun);
        begun = piece.head / wave;
      }
      for (const std::int64_t count : next) EXPECT_EQ(count, order.of_head());
    }
  }
  EXPECT_EQ((BackwardOrder{4, 2, 0, 0}.count()), 0);
}

TEST(SplitKeys, CoverTheRangeOnce) {
  for (int begin = 0; begin < 6; ++begin) {
    for (int end = begin; end < 40; ++end) {
      for (const int split_n : {1, 3, 8, 64}) {
        int next = begin;
        const int splits = ceil_div(40, split_n);
        for (int split = 0; split < splits; ++split) {
          const Range part = split_keys({begin, end}, split, split_n);
          if (part.empty()) continue;
          EXPECT_EQ(part.begin, next);
          EXPECT_LE(part.size(), split_n);
          next = part.end;
        }
        EXPECT_EQ(next, end);
      }
      EXPECT_EQ(split_keys({begin, end}, 0, 0), (Range{begin, end}));
    }
  }
}

}  // namespace
}  // namespace tessera::core
