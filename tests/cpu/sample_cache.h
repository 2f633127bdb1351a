// The cache of a random sample of the CPU's tests: lengths of every kind, pages in any order, some
// of them in two sequences, and numbers that do not exist wherever nobody may read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tessera/tensors.hpp"

namespace tessera::forward_sample {

using Random = std::mt19937_64;

inline std::int64_t pick(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

/// A key's place: along the first dimension of k and v, and along the second.
struct Slot {
  std::int64_t entry = 0, slot = 0;
};

struct SampleCache {
  std::vector<std::int32_t> seqlens, cu_new, index, leftpad, table32;
  std::vector<std::int64_t> table64;
  std::int64_t stride = 0;
  std::vector<std::vector<Slot>> keys;  ///< [batch] of all sequences

  CacheTensors tensors(const CacheShape& shape) const {
    const auto given = [](const auto& numbers) {
      return numbers.empty() ? nullptr : numbers.data();
    };
    CacheTensors t;
    t.seqlens = given(seqlens);
    t.cu_seqlens_new = given(cu_new);
    t.index = given(index);
    t.leftpad = given(leftpad);
    if (shape.page_ids == PageIds::i32) {
      t.page_table = given(table32);
    } else {
      t.page_table = given(table64);
    }
    t.stride_page_table = stride;
    return t;
  }
};

inline SampleCache make_cache(const Problem& p, Random& random) {
  const CacheShape& shape = *p.cache;
  SampleCache cache;
  const std::int64_t rows = shape.rows > 0 ? shape.rows : p.batch;
  const std::int64_t columns =
      shape.paged() ? (p.seqlen_k + shape.page_size - 1) / shape.page_size : std::int64_t{0};
  constexpr std::int64_t kNone = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int64_t> table, fresh;
  if (shape.paged()) {
    cache.stride = columns + pick(random, 0, 2);
    table.assign(static_cast<std::size_t>(rows * cache.stride), kNone);
    for (std::int64_t page = 0; page < shape.num_pages; ++page) fresh.push_back(page);
    std::shuffle(fresh.begin(), fresh.end(), random);
  }
  if (shape.lengths == Lengths::before && p.packed) cache.cu_new.push_back(7);  // any
  for (std::int64_t b = 0; b < p.batch; ++b) {
    std::int64_t end = p.seqlen_k;
    if (shape.lengths != Lengths::full) {
      std::int64_t more = shape.seqlen_new;  // 0 but for `before`
      if (!cache.cu_new.empty()) {
        more = pick(random, 0, more);
        cache.cu_new.push_back(cache.cu_new.back() + static_cast<std::int32_t>(more));
      }
      const std::int64_t room = p.seqlen_k - more;
      const std::int64_t lengths[] = {-1, 0, std::min<std::int64_t>(1, room), room};
      const std::int64_t kind = pick(random, 0, 11);
      const std::int64_t length = kind < 4 ? lengths[kind] : pick(random, 0, room);
      cache.seqlens.push_back(static_cast<std::int32_t>(length));
      end = length < 0 ? 0 : length + more;
    }
    std::int64_t begin = 0, row = b;
    if (shape.leftpad) {
      begin = pick(random, 0, 5) == 0 ? kNone : pick(random, 0, end);
      cache.leftpad.push_back(static_cast<std::int32_t>(begin));
    }
    if (shape.rows > 0) {
      row = end > 0 ? pick(random, 0, rows - 1) : -1;
      cache.index.push_back(static_cast<std::int32_t>(row));
    }
    std::vector<Slot>& keys = cache.keys.emplace_back();
    for (std::int64_t slot = begin; slot < end; ++slot) {
      if (!shape.paged()) {
        keys.push_back({row, slot});
        continue;
      }
      std::int64_t& page =
          table[static_cast<std::size_t>(row * cache.stride + slot / shape.page_size)];
      if (page == kNone && !fresh.empty() && pick(random, 0, 7) > 0) {
        page = fresh.back();
        fresh.pop_back();
      } else if (page == kNone) {
        page = pick(random, 0, shape.num_pages - 1);
      }
      keys.push_back({page, slot % shape.page_size});
    }
  }
  for (const std::int64_t page : table) {
    cache.table32.push_back(static_cast<std::int32_t>(page));
    cache.table64.push_back(page == kNone ? std::int64_t{-1} << 50 : page);
  }
  return cache;
}

}  // namespace tessera::forward_sample
