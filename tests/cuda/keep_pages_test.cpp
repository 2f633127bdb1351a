// Pages that a table does not skip, listed on a GPU (cuda/aux/keep_pages.h): the kernel, run on the
// host thread by thread, beside a loop over the table. Tables are longer than a sweep of the block.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "archs.h"
#include "cuda/keep_pages_host.h"

namespace tessera::cuda {
namespace {

using aux::KeepPagesParams;

/// A batch of sequences and a table of so many columns.
class Tables {
 public:
  Tables(std::mt19937& random, bool wide, int page_size, int columns)
      : random_(random), wide_(wide), page_size_(page_size), columns_(columns) {
    const int rows = 4;
    stride_ = columns + below(3);
    // Of some rows all pages are skipped, of others none.
    for (int row = 0; row < rows; ++row) {
      const int skipped = row == 0 ? 0 : row == 1 ? 100 : below(101);
      for (int column = 0; column < stride_; ++column) {
        table_.push_back(below(100) < skipped ? -1 - below(5) : below(1000));
      }
    }
    narrow_.assign(table_.begin(), table_.end());
    const int capacity = columns * page_size;
    for (int b = 0; b < kBatch; ++b) {
      index_.push_back(below(rows));
      lengths_.push_back(b == 0 ? -3 : b == 1 ? 0 : b == 2 ? capacity : below(capacity + 1));
    }
  }

  void check() {
    KeepPagesParams p;
    p.sequences = {nullptr, nullptr, 1, columns_ * page_size_};
    p.cache.used = true;
    p.cache.seqlens = lengths_.data();
    p.cache.index = index_.data();
    p.cache.rows = 4;
    p.cache.capacity = columns_ * page_size_;
    p.cache.pages.table = wide_ ? static_cast<const void*>(table_.data()) : narrow_.data();
    p.cache.pages.stride = stride_;
    p.cache.pages.count = 1000;
    p.cache.pages.size = page_size_;
    p.cache.pages.ids = wide_ ? PageIds::i64 : PageIds::i32;
    const std::size_t all = std::size_t{kBatch} * static_cast<std::size_t>(columns_);
    std::vector<std::int64_t> kept(all, -9);
    std::vector<std::int32_t> kept_narrow(all, -9), seqlens(kBatch, -9);
    p.table = wide_ ? static_cast<void*>(kept.data()) : kept_narrow.data();
    p.stride = columns_;
    p.seqlens = seqlens.data();
    host::launch(kBatch, [&] { aux::keep_pages(p); });
    if (!wide_) kept.assign(kept_narrow.begin(), kept_narrow.end());
    for (int b = 0; b < kBatch; ++b) check_sequence(b, kept, seqlens[static_cast<std::size_t>(b)]);
  }

 private:
  static constexpr int kBatch = 7;

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  void check_sequence(int b, const std::vector<std::int64_t>& kept, std::int32_t seqlen) const {
    const std::int32_t length = lengths_[static_cast<std::size_t>(b)];
    const std::string text = "sequence " + std::to_string(b) + ", keys " + std::to_string(length) +
                             ", pages of " + std::to_string(page_size_);
    std::vector<std::int64_t> expected;
    int keys = 0;
    for (int first = 0, column = 0; first < length; first += page_size_, ++column) {
      const std::int64_t page =
          table_[static_cast<std::size_t>(index_[static_cast<std::size_t>(b)] * stride_ + column)];
      if (page < 0) continue;
      expected.push_back(page);
      keys += std::min(page_size_, length - first);
    }
    EXPECT_EQ(seqlen, length < 0 ? -1 : keys) << text;
    expected.resize(static_cast<std::size_t>(columns_), -9);  // nothing is written behind them
    const auto begin = kept.begin() + std::int64_t{b} * columns_;
    EXPECT_EQ(std::vector(begin, begin + columns_), expected) << text;
  }

  std::mt19937& random_;
  bool wide_;
  int page_size_, columns_;
  std::int64_t stride_ = 0;
  std::vector<std::int64_t> table_;
  std::vector<std::int32_t> narrow_, index_, lengths_;
};

TEST(KeepPages, ListsWhatIsLeftInItsOrder) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr int kSweep = aux::kKeepThreads * 16;
  for (const int columns : {1, 513, kSweep, 2 * kSweep + 700}) {
    for (const bool wide : {false, true}) {
      if (kSanitized && columns > kSweep && wide) continue;
      const int sizes[] = {1, 3, 64};
      Tables(random, wide, sizes[random() % 3], columns).check();
    }
  }
}

}  // namespace
}  // namespace tessera::cuda
