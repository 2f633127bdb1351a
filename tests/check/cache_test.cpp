// The memory of random caches: what sequences have are numbers, and everything else is poison or a
// number that does not exist, so that a check sees whoever reads it.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "check/runs.h"

namespace tessera::tools {
namespace {

constexpr const char* kProblems[] = {
    "fwd b=5 h=4/2 q=3 k=40 d=5 cache=after",
    "fwd b=5 h=4/2 q=3 k=40 d=5 cache=full pages=30x8",
    "fwd b=5 h=4/2 q=3 k=40 d=5/3 cache=after pages=30x8",
    "fwd b=5 h=4/2 q=3 k=40 d=5 cache=before:3 pages=999x1:i64 leftpad",
    "fwd b=5 h=4/2 q=3 k=40 d=5 cache=before:3 packed=9 pages=9x16 rows=3 leftpad",
    "fwd b=5 h=4/2 q=3 k=40 d=5 cache=after rows=7",
    "fwd b=5 h=4/2 q=3 k=40 d=5 cache=after pages=0x16",
};

/// Rows of k and v that hold numbers, not NaN; every row is one or the other.
std::int64_t rows_with_numbers(const RunMemory& memory) {
  std::int64_t rows = 0;
  const Problem& p = memory.problem();
  const bool paged = p.cache->paged();
  const std::int64_t slots = paged ? p.cache->page_size : p.seqlen_k;
  const auto numbers = [](const ConstTensor& t, std::int64_t at, std::int64_t dim) {
    std::int64_t count = 0;
    for (std::int64_t x = 0; x < dim; ++x) {
      count += std::isnan(reference::load(Dtype::f32, t.data, at + x)) ? 0 : 1;
    }
    EXPECT_TRUE(count == 0 || count == dim);
    return count > 0;
  };
  for (std::int64_t slot = 0; slot < p.rows_k(); ++slot) {
    std::set<bool> found;
    for (std::int64_t h = 0; h < p.num_heads_k; ++h) {
      const auto at = [&](const ConstTensor& t) {
        return slot / slots * t.stride_batch + slot % slots * t.stride_seqlen + h * t.stride_head;
      };
      const Tensors& t = memory.tensors();
      found.insert(numbers(t.k, at(t.k), p.head_dim));
      found.insert(numbers(t.v, at(t.v), p.head_dim_v));
    }
    EXPECT_EQ(found.size(), 1U);
    rows += *found.begin() ? 1 : 0;
  }
  return rows;
}

/// Where the keys of all sequences lie, by the first head's first element.
std::multiset<const void*> keys_of(const RunMemory& memory) {
  const Problem& p = memory.problem();
  const Tensors& t = memory.tensors();
  std::multiset<const void*> places;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    std::int64_t end = p.seqlen_k, row = b;
    if (p.cache->lengths != Lengths::full) end = t.cache.seqlens[b];
    if (end >= 0 && p.cache->lengths == Lengths::before) {
      end += p.packed ? t.cache.cu_seqlens_new[b + 1] - t.cache.cu_seqlens_new[b]
                      : p.cache->seqlen_new;
    }
    EXPECT_LE(end, p.seqlen_k);
    if (end > 0 && p.cache->rows > 0) row = t.cache.index[b];
    for (std::int64_t slot = p.cache->leftpad ? t.cache.leftpad[b] : 0; slot < end && end > 0;
         ++slot) {
      std::int64_t at = row * t.k.stride_batch + slot * t.k.stride_seqlen;
      if (p.cache->paged()) {
        const std::int64_t entry = row * t.cache.stride_page_table + slot / p.cache->page_size;
        const std::int64_t page = p.cache->page_ids == PageIds::i64
                                      ? static_cast<const std::int64_t*>(t.cache.page_table)[entry]
                                      : static_cast<const std::int32_t*>(t.cache.page_table)[entry];
        EXPECT_TRUE(page >= 0 && page < p.cache->num_pages) << page;
        at = page * t.k.stride_batch + slot % p.cache->page_size * t.k.stride_seqlen;
      }
      places.insert(static_cast<const float*>(t.k.data) + at);
    }
  }
  return places;
}

TEST(RandomCache, OnlyKeysAreNumbers) {
  for (const char* text : kProblems) {
    bool shared = false, together = false;
    std::set<std::int32_t> lengths;
    for (int i = 0; i < 60; ++i) {
      const std::uint64_t seed =
          seed_with({Values::normal, false, i % 2 == 0, true}, std::random_device{}());
      SCOPED_TRACE(std::string(text) + ", seed " + std::to_string(seed));
      const RunMemory memory(parse(text), seed);
      const std::multiset<const void*> places = keys_of(memory);
      const std::set<const void*> distinct(places.begin(), places.end());
      ASSERT_EQ(rows_with_numbers(memory), static_cast<std::int64_t>(distinct.size()));
      shared |= distinct.size() < places.size();
      together |= memory.blocks()[memory.problem().packed ? 2 : 1].name == "kv";
      const std::int32_t* seqlens = memory.tensors().cache.seqlens;
      if (seqlens != nullptr) lengths.insert(seqlens, seqlens + memory.problem().batch);
      EXPECT_EQ(memory.damage(), "");
    }
    const Problem p = parse(text);
    EXPECT_TRUE(together) << text;
    if (p.cache->paged() && p.cache->num_pages == 0) continue;
    EXPECT_EQ(shared, p.cache->paged() || p.cache->rows > 0) << text;
    if (p.cache->lengths == Lengths::full) continue;
    const auto most = static_cast<std::int32_t>(p.seqlen_k - p.cache->seqlen_new);
    for (const std::int32_t length : {-1, 0, 1}) EXPECT_TRUE(lengths.contains(length)) << text;
    EXPECT_GE(*lengths.rbegin(), most) << text;
    EXPECT_GT(lengths.size(), 20U) << text;
  }
}

TEST(RandomCache, FollowsFromTheSeed) {
  for (const char* text : kProblems) {
    const std::uint64_t seed = std::random_device{}();
    const RunMemory a(parse(text), seed), b(parse(text), seed);
    ASSERT_EQ(a.blocks().size(), b.blocks().size());
    for (std::size_t i = 0; i < a.blocks().size(); ++i) {
      EXPECT_EQ(a.blocks()[i].before, b.blocks()[i].before) << text << " " << a.blocks()[i].name;
    }
  }
}

}  // namespace
}  // namespace tessera::tools
