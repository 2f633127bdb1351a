// Where scales lie (S14), against a walk through all rows of all sequences.
#include "core/scales.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::core {
namespace {

TEST(Scales, DenseOnesAreStridedBySequenceAndHead_S14) {
  std::vector<float> numbers(1000);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  const Sequences sequences = {nullptr, nullptr, 5, 20};
  const Sequence second = sequences.at(1);
  const Scales token = {numbers.data(), 100, 7, Scaling::token, 0};
  const Scales head = {numbers.data(), 100, 7, Scaling::head, 0};
  const Scales block = {numbers.data(), 100, 7, Scaling::block, 8};
  const Scales all = {numbers.data(), 100, 7, Scaling::tensor, 0};
  for (int row = 0; row < 5; ++row) {
    EXPECT_EQ(token.of(second, 3)[token.index_of(row)], static_cast<float>(100 + 21 + row));
    EXPECT_EQ(head.of(second, 3)[head.index_of(row)], 121.0F);
    EXPECT_EQ(all.of(second, 3)[all.index_of(row)], 0.0F);
  }
  for (int key = 0; key < 20; ++key) {
    const int number = 121 + key / 8;
    EXPECT_EQ(block.of(second, 3)[block.index_of(key)], static_cast<float>(number));
  }
}

/// No two sequences share a block, whatever their lengths, and no block lies beyond the last one.
TEST(Scales, BlocksOfPackedSequencesBeginWithThem_S14) {
  constexpr int kBatch = 4;
  for (int block = 1; block <= 9; ++block) {
    for (int lengths = 0; lengths < 10 * 10 * 10 * 10; lengths += 7) {
      std::int32_t cu[kBatch + 1] = {};
      for (int b = 0, rest = lengths; b < kBatch; ++b, rest /= 10) cu[b + 1] = cu[b] + rest % 10;
      const Sequences sequences = {cu, cu, 9, 9};
      const int blocks = cu[kBatch] / block + kBatch;
      std::vector<float> owner(static_cast<std::size_t>(blocks), -1.0F);
      const Scales scales = {owner.data(), 1 << 20, blocks, Scaling::block, block};
      for (int b = 0; b < kBatch; ++b) {
        const Sequence sequence = sequences.at(b);
        for (int key = 0; key < sequence.seqlen_k; ++key) {
          const auto at = static_cast<std::size_t>(scales.of(sequence, 0) + scales.index_of(key) -
                                                   owner.data());
          ASSERT_LT(at, owner.size()) << "block " << block << " lengths " << lengths;
          ASSERT_TRUE(owner[at] == -1.0F || owner[at] == static_cast<float>(b));
          owner[at] = static_cast<float>(b);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::core
