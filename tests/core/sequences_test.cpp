// S11: where sequences lie, dense and packed, checked against the layouts written out.
#include "core/sequences.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace tessera::core {
namespace {

/// Every row of every sequence is the one of the layout that the docs describe: (batch, seqlen,
/// heads, dim) with any strides, or (total, heads, dim) with the sequences one after another; and
/// softmax_lse is (batch, heads, seqlen_q), or (heads, total_q).
TEST(Sequences, RowsLieWhereTheLayoutsSay_S11) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 500; ++trial) {
    const int batch = 1 + below(4), heads = 1 + below(3), longest = 9;
    const bool packed = below(2) == 0;
    std::vector<std::int32_t> cu_q = {0}, cu_k = {0};
    for (int b = 0; b < batch; ++b) {
      cu_q.push_back(cu_q.back() + below(longest + 1));
      cu_k.push_back(cu_k.back() + below(longest + 1));
    }
    Sequences all;
    all.seqlen_q = longest;
    all.seqlen_k = longest + 2;
    if (packed) {
      all.cu_seqlens_q = cu_q.data();
      all.cu_seqlens_k = cu_k.data();
    }
    ASSERT_EQ(all.packed(), packed);
    const Strides strides = {1000 + below(100), 10 + below(10), 1 + below(5)};
    for (int b = 0; b < batch; ++b) {
      const auto i = static_cast<std::size_t>(b);
      const Sequence sequence = all.at(b);
      ASSERT_EQ(sequence.batch, b);
      ASSERT_EQ(sequence.seqlen_q, packed ? cu_q[i + 1] - cu_q[i] : longest) << "seed " << seed;
      ASSERT_EQ(sequence.seqlen_k, packed ? cu_k[i + 1] - cu_k[i] : longest + 2);
      for (int head = 0; head < heads; ++head) {
        const std::int64_t of_head = head * strides.head;
        ASSERT_EQ(sequence.query_offset(strides, 5, head),
                  of_head + (packed ? (cu_q[i] + 5) * strides.seqlen
                                    : b * strides.batch + 5 * strides.seqlen));
        ASSERT_EQ(sequence.key_offset(strides, 3, head),
                  of_head + (packed ? (cu_k[i] + 3) * strides.seqlen
                                    : b * strides.batch + 3 * strides.seqlen));
        const std::int64_t lse_head = packed ? cu_q.back() : longest;
        ASSERT_EQ(sequence.lse_index(lse_head, heads, head, 4),
                  packed ? head * cu_q.back() + cu_q[i] + 4 : (b * heads + head) * longest + 4);
      }
    }
  }
}

/// Offsets are counted in 64 bits.
TEST(Sequences, OffsetsBeyond32Bits_S11) {
  const Sequence dense{3, 10, 10, 0, 0, false};
  const Strides strides = {std::int64_t{1} << 33, std::int64_t{1} << 20, 64};
  EXPECT_EQ(dense.query_offset(strides, 9, 1),
            3 * (std::int64_t{1} << 33) + 9 * (std::int64_t{1} << 20) + 64);
  const Sequence packed{0, 10, 10, 1 << 30, 1 << 30, true};
  EXPECT_EQ(packed.key_offset(strides, 1, 0), ((std::int64_t{1} << 30) + 1) << 20);
  EXPECT_EQ(packed.lse_index(std::int64_t{1} << 31, 4, 3, 1),
            3 * (std::int64_t{1} << 31) + (1 << 30) + 1);
}

/// No two sequences share a block, none lies beyond count(), and that is no more than one block a
/// sequence too many.
TEST(RowBlocks, NoTwoSequencesShareOne_S11) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (int trial = 0; trial < 2000; ++trial) {
    const int block_m = 1 << random() % 4, longest = static_cast<int>(random() % 40);
    const auto batch = static_cast<std::int64_t>(random() % 6);
    for (const bool packed : {false, true}) {
      const RowBlocks blocks{block_m, ceil_div(longest, block_m)};
      std::int64_t rows = 0, taken = 0, end = 0;
      for (std::int64_t b = 0; b < batch; ++b) {
        const auto any = static_cast<int>(random() % static_cast<unsigned>(longest + 1));
        const int length = !packed ? longest : random() % 4 == 0 ? 0 : any;
        const Sequence sequence{static_cast<int>(b), length, 0, static_cast<int>(rows), 0, packed};
        const std::int64_t first = blocks.first_of(sequence);
        ASSERT_GE(first, end) << "seed " << seed;
        end = first + ceil_div(length, block_m);
        taken += ceil_div(length, block_m);
        rows += length;
      }
      const std::int64_t count = blocks.count(packed, rows, batch);
      ASSERT_LE(end, count) << "seed " << seed;
      ASSERT_LE(count, taken + (packed ? batch : 0)) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace tessera::core
