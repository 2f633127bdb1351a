// How the Hopper forward's producer fetches keys that lie in pages (sm90/forward_pages.h), run on
// the host thread by thread: every row of a buffer must be its key's, wherever that lies, in the
// order that wgmma reads; zeros of pages that do not exist; and as many bytes as are announced.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/pages_host.h"
#include "plan/catalog.h"
#include "plan/names.h"

namespace tessera::cuda {
namespace {

using sm90::ForwardParams;
using sm90::LoadRows;

constexpr core::Kernel row_of(int head_dim, int head_dim_v, int block_m, int block_n) {
  for (const core::Kernel& row : kCatalog) {
    if (row.arch == Arch::sm90 && row.pass == Pass::forward && row.form == core::Form::tile &&
        row.operand == core::Operand::bf16 && !row.any_layout && row.head_dim == head_dim &&
        row.head_dim_v == head_dim_v && row.block_m == block_m && row.block_n == block_n) {
      return row;
    }
  }
  return {};
}

/// A pool of pages of keys, a sequence in it, and a buffer for a block.
template <core::Kernel K>
class Fetch {
 public:
  explicit Fetch(std::mt19937& random) : random_(random) {
    page_size_ = pick({1, 2, 3, 8, 16, 24, 48, 64, 100, 128, 256});
    leftpad_ = below(4) == 0;
    const int capacity = 4 * K.block_n;
    seqlen_ = 1 + below(capacity - 1);
    first_ = leftpad_ ? below(40) : 0;
    columns_ = core::ceil_div(first_ + seqlen_, page_size_);
    pages_ = columns_ + 3;
    wide_ = below(2) == 0;
    first_column_ = pick({0, 0, 64, 128});
    dim_ = first_column_ + K.head_dim - 8 * below(3);
    data_.resize(static_cast<std::size_t>(kHeads * pages_ * page_size_ * dim_));
    for (std::uint16_t& x : data_) x = static_cast<std::uint16_t>(1 + below(65535));
    for (int i = 0; i < 2 * columns_; ++i) {
      const bool hostile = below(6) == 0;
      table_.push_back(hostile ? pick({-1, -7, pages_, 2147483647}) : below(pages_));
      if (wide_ && hostile && below(2) == 0) table_.back() += std::int64_t{1} << 32;
    }
    narrow_.assign(table_.begin(), table_.end());
  }

  void check(int block) {
    ForwardParams p;
    p.cache.pages = {wide_ ? static_cast<const void*>(table_.data()) : narrow_.data(), columns_,
                     pages_, page_size_, wide_ ? PageIds::i64 : PageIds::i32};
    p.page_size = core::Divisor(page_size_);
    p.box_keys = core::box_keys(page_size_, K.block_n, leftpad_);
    if (p.box_keys < sm90::kLeastBox) p.box_keys = 1;
    const Source source = {data_.data(), {kHeads * page_size_ * dim_, kHeads * dim_, dim_}};
    const LoadRows keys = {first_ + block * K.block_n, seqlen_ - block * K.block_n, kHead, kRow};
    ptx::TensorMap map;
    const ptx::HostMap host = {data_.data(),
                               {dim_, page_size_, kHeads, pages_},
                               {1, kHeads * dim_, dim_, kHeads * page_size_ * dim_},
                               p.box_keys};
    std::memcpy(&map, &host, sizeof host);
    sm90::Ring<sm90::kStages> ring = {};
    ring.data = 1024;
    ring.bytes = sm90::ForwardShape<K>::kKBytes;
    std::memset(ptx::shared_memory(0), 0xEE, 1 << 17);
    ptx::arrivals().threads = 0;
    ptx::arrivals().expected = ptx::arrivals().bytes = 0;
    // The warps of keys, or those of values.
    const bool values = below(2) == 0;
    host::launch(1, [&] {
      using Fetcher = sm90::PageFetcher<K, sm90::ForwardShape<K>::kChunks>;
      if (!Fetcher::takes_part(p) || Fetcher::has_values() != values) return;
      const Fetcher fetcher(p);
      fetcher.fetch(ring, 1, map, source, dim_, keys, fetcher.look_up(keys), first_column_);
    });
    const ptx::Arrivals& arrived = ptx::arrivals();
    EXPECT_EQ(arrived.threads, p.copies_rows() ? sm90::kPageWarps : 1);
    EXPECT_EQ(arrived.bytes, arrived.expected);
    EXPECT_EQ(arrived.expected, p.copies_rows() ? 0 : ring.bytes);
    compare(keys, ring.data + ring.bytes, p.copies_rows());
    ++(p.copies_rows() ? copied : boxed);
  }

  int copied = 0, boxed = 0, missing = 0;

 private:
  static constexpr std::int64_t kHeads = 2;
  static constexpr int kHead = 1, kRow = 1;

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  int pick(std::initializer_list<int> of) { return of.begin()[below(static_cast<int>(of.size()))]; }

  /// Rows beyond the sequence are zeros where threads copy them, and anything in a box.
  void compare(const LoadRows& keys, std::uint32_t buffer, bool copied_rows) {
    for (int row = 0; row < K.block_n; ++row) {
      if (row >= keys.valid && !copied_rows) break;
      const int slot = keys.row + row;
      const std::int64_t page =
          row < keys.valid
              ? table_[static_cast<std::size_t>(std::int64_t{kRow} * columns_ + slot / page_size_)]
              : -1;
      const bool exists = page >= 0 && page < pages_;
      missing += exists ? 0 : 1;
      for (int column = 0; column < core::round_up(K.head_dim, 64); ++column) {
        const std::int64_t at = ((page * page_size_ + slot % page_size_) * kHeads + kHead) * dim_ +
                                first_column_ + column;
        const std::uint16_t expected = exists && first_column_ + column < dim_
                                           ? data_[static_cast<std::size_t>(at)]
                                           : std::uint16_t{0};
        const std::uint32_t line = static_cast<std::uint32_t>(column / 64 * K.block_n + row) * 128;
        const std::uint32_t unit = static_cast<std::uint32_t>(column / 8 % 8 ^ row % 8);
        std::uint16_t found = 0;
        std::memcpy(&found,
                    ptx::shared_memory(buffer + line + unit * 16 +
                                       static_cast<std::uint32_t>(column % 8 * 2)),
                    2);
        ASSERT_EQ(found, expected) << "row " << row << " column " << column << " page " << page
                                   << " of " << page_size_ << " slots, head_dim " << dim_;
      }
    }
  }

  std::mt19937& random_;
  int page_size_ = 0, seqlen_ = 0, first_ = 0, columns_ = 0, pages_ = 0, dim_ = 0;
  int first_column_ = 0;
  bool leftpad_ = false, wide_ = false;
  std::vector<std::uint16_t> data_;
  std::vector<std::int64_t> table_;
  std::vector<std::int32_t> narrow_;
};

template <core::Kernel K>
void check_row() {
  static_assert(K.head_dim > 0);
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  const testing::ScopedTrace trace(__FILE__, __LINE__,
                                   name_of(K) + " seed " + std::to_string(seed));
  int copied = 0, boxed = 0, missing = 0;
  for (int trial = 0; trial < 40; ++trial) {
    Fetch<K> fetch(random);
    fetch.check(static_cast<int>(random() % 2));
    if (testing::Test::HasFatalFailure()) return;
    copied += fetch.copied;
    boxed += fetch.boxed;
    missing += fetch.missing;
  }
  EXPECT_GT(copied, 0);
  EXPECT_GT(boxed, 0);
  EXPECT_GT(missing, 0);
}

TEST(Pages, EveryRowOfABufferIsItsKeys_S13) {
  check_row<row_of(64, 64, 128, 128)>();
  check_row<row_of(96, 96, 192, 80)>();
  check_row<row_of(128, 128, 128, 128)>();
  check_row<row_of(192, 192, 128, 96)>();
  check_row<row_of(256, 256, 128, 64)>();
}

}  // namespace
}  // namespace tessera::cuda
