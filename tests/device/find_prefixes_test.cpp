// Prefixes that neighbours share, found on a GPU (cuda/aux/find_prefixes.h): the kernel on fibers,
// beside loops over the page table. Batches and tables are longer than what it holds at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cuda/aux/find_prefixes_params.h"
#include "kernels.h"

namespace tessera::device {
namespace {

std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// Sequences, of which neighbours have pages in common, and what the kernel makes of them.
class Batch {
 public:
  Batch(std::mt19937& random, int batch, int columns) : random_(random), columns_(columns) {
    page_size_ = 1 + below(40);
    wide_ = below(2) == 0;
    stride_ = columns + below(3);
    std::vector<std::int64_t> row;
    for (int b = 0; b < batch; ++b) {
      row.resize(
          at(below(4) == 0 ? 0 : std::min(below(2 * columns), static_cast<int>(row.size()))));
      while (static_cast<int>(row.size()) < stride_) row.push_back(below(1 << 20));
      table_.insert(table_.end(), row.begin(), row.end());
      lengths_.push_back(below(8) == 0 ? below(3) - 1 : below(columns * page_size_ + 1));
      leftpad_.push_back(below(8) == 0 ? 1 : 0);
      queries_.push_back(queries_.empty() ? 0 : queries_.back() + below(4));
    }
    queries_.push_back(queries_.back() + 2);
    narrow_.assign(table_.begin(), table_.end());
  }

  void check(bool packed, int window_left) {
    const int batch = static_cast<int>(lengths_.size());
    cuda::aux::FindPrefixesParams p;
    p.sequences = {packed ? queries_.data() : nullptr, packed ? zeros(batch) : nullptr, 2,
                   columns_ * page_size_};
    p.cache.used = true;
    p.cache.seqlens = lengths_.data();
    p.cache.leftpad = leftpad_.data();
    p.cache.capacity = columns_ * page_size_;
    p.cache.pages.table = wide_ ? static_cast<const void*>(table_.data()) : narrow_.data();
    p.cache.pages.stride = stride_;
    p.cache.pages.count = 1 << 20;
    p.cache.pages.size = page_size_;
    p.cache.pages.ids = wide_ ? PageIds::i64 : PageIds::i32;
    p.mask.window.left = window_left;
    p.mask.window.right = 0;
    p.rules = {.batch = batch,
               .levels = 1 + below(4),
               .heads = 2,
               .unit_n = 64,
               .spans = {.fixed = 2},
               .rows = {p.sequences.cu_seqlens_q, 2, 4, below(2) == 0 ? 64 : 16}};
    p.ticket = 77;
    std::vector<std::uint64_t> common(at(batch), std::uint64_t{76} << 32 | 5);
    std::vector<core::CommonKeys> list(at(batch));
    std::vector<core::OwnKeys> own(at(batch));
    std::vector<core::Segment> segments(at(2 * batch));
    core::SegmentCount count;
    p.common = common.data();
    p.list = list.data();
    p.own = own.data();
    p.segments = segments.data();
    p.count = &count;
    std::string wrong;
    ASSERT_TRUE(launch_decode("find_prefixes", static_cast<unsigned>(batch), &p, wrong));
    EXPECT_EQ(wrong, "");
    segments.resize(at(count.count));

    // The same by the rules of core/prefixes.h, from common keys that a loop counts.
    std::vector<core::CommonKeys> expected_list(at(batch));
    std::vector<core::OwnKeys> expected_own(at(batch));
    const int runs = core::list_common_keys(
        batch, [&](int b) { return common_keys(p, b); }, [](int b) { return b + 1; },
        expected_list.data());
    std::vector<core::Segment> prefixes, expected;
    const core::ChosenPrefixes chosen = core::choose_prefixes(
        expected_list.data(), runs, p.rules, expected_own.data(),
        [&prefixes](int, const core::Segment& prefix) { prefixes.push_back(prefix); });
    for (int b = 0; b < batch; ++b) {
      expected.push_back(core::rest_of(b, keys_of(b), expected_own[at(b)]));
    }
    expected.insert(expected.end(), prefixes.begin(), prefixes.end());
    EXPECT_EQ(count.count, batch + chosen.count);
    EXPECT_EQ(count.prefix_cost, chosen.cost);
    EXPECT_TRUE(segments == expected);
    found_ += chosen.count;
    // A replay of the same run must wait for this launch's blocks again.
    EXPECT_EQ(common, std::vector<std::uint64_t>(at(batch)));
  }

  int found() const { return found_; }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(std::max(n, 1))); }

  /// cu_seqlens_k of packed queries over a cache: it says where they lie.
  const std::int32_t* zeros(int batch) {
    zeros_.assign(at(batch + 1), 0);
    return zeros_.data();
  }
  int keys_of(int b) const { return std::max(lengths_[at(b)] - leftpad_[at(b)], 0); }
  int queries_of(const cuda::aux::FindPrefixesParams& p, int b) const {
    return p.sequences.packed() ? queries_[at(b + 1)] - queries_[at(b)] : 2;
  }

  /// Whole pages that both have first, if all their queries see these.
  int common_keys(const cuda::aux::FindPrefixesParams& p, int b) const {
    int columns = columns_;
    for (const int one : {b - 1, b}) {
      if (leftpad_[at(one)] != 0) return 0;
      // The first query sees least of the end, the last one least of the beginning.
      const int queries = queries_of(p, one), keys = keys_of(one);
      const auto left = static_cast<int>(p.mask.window.left);
      if (left >= 0 && keys - 1 - left > 0) return 0;
      if (queries == 0) return 0;
      columns = std::min(columns, std::max(keys - queries + 1, 0) / page_size_);
    }
    int same = 0;
    const auto* const before = &table_[at((b - 1) * stride_)];
    const auto* const mine = &table_[at(b * stride_)];
    while (same < columns && before[same] == mine[same]) ++same;
    return same * page_size_;
  }

  std::mt19937& random_;
  int columns_, page_size_, found_ = 0;
  bool wide_;
  int stride_;
  std::vector<std::int64_t> table_;
  std::vector<std::int32_t> narrow_, lengths_, leftpad_, queries_, zeros_;
};

TEST(FindPrefixes, FindsWhatTheTableHasInCommon) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr int kSweep = cuda::aux::kFindThreads * 8, kHeld = 512;
  const struct {
    int batch, columns;
  } sizes[] = {{1, 5}, {12, 40}, {100, 9}, {kHeld, 3}, {kHeld + 60, 20}, {9, 2 * kSweep + 30}};
  int found = 0;
  for (const auto& size : sizes) {
    SCOPED_TRACE(std::to_string(size.batch) + " sequences, columns " +
                 std::to_string(size.columns));
    Batch batch(random, size.batch, size.columns);
    batch.check(false, -1);
    batch.check(true, -1);
    batch.check(false, size.columns * 10);
    found += batch.found();
  }
  EXPECT_GT(found, 0);
}

}  // namespace
}  // namespace tessera::device
