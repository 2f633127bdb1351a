// S13: how many keys a sequence of a cache has and where they lie, against the words written out
// again; what does not exist counts as S13 says.
#include "core/pages.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <vector>

namespace tessera::core {
namespace {

constexpr std::int32_t kMost = INT32_MAX, kLeast = INT32_MIN;

TEST(Pages, NumbersOfBothTypes_S13) {
  const std::array<std::int32_t, 6> narrow = {7, -1, 0, 2, kMost, kLeast};
  const std::array<std::int64_t, 6> wide = {7, -1, 0, 2, std::int64_t{1} << 40, INT64_MIN};
  const Pages i32{narrow.data(), 3, 3, 16, PageIds::i32}, i64{wide.data(), 3, 3, 16, PageIds::i64};
  for (int row = 0; row < 2; ++row) {
    for (int column = 0; column < 3; ++column) {
      const auto at = static_cast<std::size_t>(row) * 3 + static_cast<std::size_t>(column);
      EXPECT_EQ(i32.at(row, column), narrow[at]);
      EXPECT_EQ(i64.at(row, column), wide[at]);
      EXPECT_EQ(i64.exists(i64.at(row, column)), at == 2 || at == 3);
    }
  }
  EXPECT_FALSE(i32.exists(3));
  // Rows further apart than 32 bits can count.
  const Pages far{narrow.data() - (std::int64_t{1} << 33), std::int64_t{1} << 33, 3, 16};
  EXPECT_EQ(far.at(1, 0), 7);
}

// Boxes divide pages and blocks, and are as high as that allows; of a sequence that may begin in
// any slot they have one key.
TEST(Pages, BoxesDividePagesAndBlocks_S13) {
  for (int block_n : {32, 64, 80, 96, 128}) {
    for (int size = 1; size <= 300; ++size) {
      int most = 0;
      for (int keys = 1; keys <= block_n; ++keys) {
        if (block_n % keys == 0 && size % keys == 0) most = keys;
      }
      EXPECT_EQ(box_keys(size, block_n, false), most) << size << " " << block_n;
      EXPECT_EQ(box_keys(size, block_n, true), 1);
    }
  }
}

/// Every sequence of random caches: dense rows or pages, by index or not, lengths of every kind,
/// padding.
TEST(Cache, SequencesHaveTheirKeys_S13) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  const auto between = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  for (int trial = 0; trial < 3000; ++trial) {
    const int batch = between(1, 4), capacity = between(0, 9), rows = between(1, 5);
    const bool has_lengths = between(0, 3) > 0, has_index = between(0, 1) > 0;
    const bool has_pads = between(0, 1) > 0, packed_new = between(0, 1) > 0;
    const int seqlen_new = has_lengths ? between(0, 3) : 0;
    const std::vector<std::int32_t> ends = {kLeast, -1, capacity, capacity + 1, kMost};
    std::vector<std::int32_t> seqlens, cu_new = {between(0, 2)}, index, pads;
    for (int b = 0; b < batch; ++b) {
      const bool any = between(0, 1) > 0;
      seqlens.push_back(any ? between(0, capacity) : ends[random() % ends.size()]);
      cu_new.push_back(cu_new.back() + between(0, 3));
      index.push_back(between(0, 3) > 0 ? between(0, rows - 1)
                                        : std::array{-1, rows, kMost, kLeast}[random() % 4]);
      pads.push_back(between(0, 3) > 0 ? between(0, capacity + 2)
                                       : std::array{-1, kMost, kLeast}[random() % 3]);
    }
    Cache cache;
    cache.used = true;
    cache.capacity = capacity;
    cache.rows = has_index ? rows : 0;
    cache.seqlen_new = seqlen_new;
    if (has_lengths) cache.seqlens = seqlens.data();
    if (has_lengths && seqlen_new > 0 && packed_new) cache.cu_seqlens_new = cu_new.data();
    if (has_index) cache.index = index.data();
    if (has_pads) cache.leftpad = pads.data();
    for (int b = 0; b < batch; ++b) {
      const auto i = static_cast<std::size_t>(b);
      // The words of S13, in 64 bits.
      std::int64_t end = capacity;
      if (has_lengths) {
        const int more = cache.cu_seqlens_new != nullptr ? cu_new[i + 1] - cu_new[i] : seqlen_new;
        end = std::int64_t{seqlens[i]} + more;
        if (seqlens[i] < 0) end = 0;
        if (end > capacity) end = capacity;
      }
      const int row = has_index ? index[i] : b;
      const bool exists = !has_index || (row >= 0 && row < rows);
      const std::int64_t pad = has_pads && pads[i] > 0 ? pads[i] : 0;
      Sequence sequence{b, 3, -77, 5, -77, false, -77};
      cache.place(sequence);
      ASSERT_EQ(sequence.seqlen_k, exists && end > pad ? end - pad : 0)
          << "seed " << seed << " trial " << trial;
      ASSERT_EQ(sequence.batch, b);
      ASSERT_EQ(sequence.seqlen_q, 3);
      ASSERT_EQ(sequence.first_q, 5);
      if (sequence.seqlen_k == 0) continue;
      ASSERT_EQ(sequence.entry_k, row);
      ASSERT_EQ(sequence.first_k, pad);
    }
  }
}

TEST(Cache, NoneLeavesASequenceAsItIs) {
  Sequence sequence{2, 3, 4, 5, 6, true, 7};
  Cache{}.place(sequence);
  EXPECT_EQ(sequence.seqlen_k, 4);
  EXPECT_EQ(sequence.first_k, 6);
  EXPECT_EQ(sequence.entry_k, 7);
}

/// Slot s of a sequence is slot s % size of its page s / size; in rows, slot s of its row. Heads
/// and slots may lie either way.
TEST(Cache, KeysLieInTheirSlots_S13) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  for (const int size : {1, 2, 3, 16, 100}) {
    std::vector<std::int32_t> table(60);
    for (std::int32_t& page : table) page = static_cast<std::int32_t>(random() % 1000);
    const Pages pages{table.data(), 20, 1000, size};
    for (const Strides strides : {Strides{std::int64_t{1} << 33, 40, 8}, {7000, 8, 7000 / 3}}) {
      for (const int first : {0, 1, 5}) {
        const Sequence sequence{0, 1, 11, 0, first, false, 2};
        for (int key = 0; key < 11; ++key) {
          const int slot = first + key;
          const std::int64_t page = table[std::size_t{40} + static_cast<std::size_t>(slot / size)];
          EXPECT_EQ(slot_offset(pages, sequence, strides, key, 3),
                    page * strides.batch + slot % size * strides.seqlen + 3 * strides.head)
              << "seed " << seed;
          EXPECT_EQ(slot_offset({}, sequence, strides, key, 3),
                    2 * strides.batch + slot * strides.seqlen + 3 * strides.head);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::core
