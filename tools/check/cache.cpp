// Draws lengths first, then pages for the slots that they reach.
#include "check/cache.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace tessera::tools {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kLeast = std::numeric_limits<std::int32_t>::min();

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t one_of(std::initializer_list<std::int64_t> values, Random& random) {
  const auto last = static_cast<std::int64_t>(values.size()) - 1;
  return values.begin()[random.next_between(0, last)];
}

/// A number that is in no [0, count).
std::int64_t hostile(std::int64_t count, Random& random) {
  return one_of({-1, -2, kLeast, kMost, std::min(count, kMost)}, random);
}

/// Slots filled before an append, of `room`.
std::int64_t draw_length(std::int64_t room, Random& random) {
  switch (random.next_between(0, 7)) {
    case 0: return one_of({-1, -7, kLeast}, random);
    case 1: return 0;
    case 2: return std::min<std::int64_t>(room, 1);
    case 3: return room;
    default: return random.next_between(0, room);
  }
}

std::int64_t draw_pad(std::int64_t filled, Random& random) {
  if (filled <= 0) return one_of({0, -1, kMost}, random);
  switch (random.next_between(0, 7)) {
    case 0: return one_of({filled, filled + 1, kMost}, random);
    case 1: return 0;
    default: return random.next_between(0, filled);
  }
}

}  // namespace

CacheLayout::CacheLayout(const Problem& problem, std::int64_t padding, Random& random) {
  const CacheShape& shape = *problem.cache;
  if (shape.lengths == Lengths::before && problem.packed) cu_seqlens_new.push_back(0);
  std::vector<Keys> sequences;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    sequences.push_back(draw_sequence(problem, b, random));
  }
  if (shape.paged()) draw_pages(problem, sequences, padding, random);
  used.resize(size(problem.rows_k()));
  for (const Keys& keys : sequences) {
    for (std::int64_t slot = keys.begin; slot < keys.end; ++slot) {
      std::int64_t at = keys.row * problem.seqlen_k + slot;
      if (shape.paged()) {
        const std::int64_t page =
            page_table[size(keys.row * stride_page_table + slot / shape.page_size)];
        if (page < 0) continue;  // it is skipped
        at = page * shape.page_size + slot % shape.page_size;
      }
      used[size(at)] = true;
    }
  }
}

CacheLayout::Keys CacheLayout::draw_sequence(const Problem& problem, std::int64_t batch,
                                             Random& random) {
  const CacheShape& shape = *problem.cache;
  const std::int64_t capacity = problem.seqlen_k;
  std::int64_t filled = capacity;
  if (shape.lengths != Lengths::full) {
    std::int64_t more = shape.lengths == Lengths::before ? shape.seqlen_new : 0;
    if (!cu_seqlens_new.empty()) {
      more = random.next_between(0, more);
      cu_seqlens_new.push_back(cu_seqlens_new.back() + static_cast<std::int32_t>(more));
    }
    const bool none = shape.paged() && shape.num_pages == 0;
    const std::int64_t length = none ? -1 : draw_length(capacity - more, random);
    seqlens.push_back(static_cast<std::int32_t>(length));
    filled = length < 0 ? -1 : length + more;
  }
  std::int64_t pad = 0, row = batch;
  if (shape.leftpad) {
    pad = draw_pad(filled, random);
    leftpad.push_back(static_cast<std::int32_t>(pad));
  }
  if (shape.rows > 0) {
    row = filled > 0 ? random.next_between(0, shape.rows - 1) : hostile(shape.rows, random);
    index.push_back(static_cast<std::int32_t>(row));
  }
  return filled > 0 ? Keys{row, pad, filled} : Keys{};
}

void CacheLayout::draw_pages(const Problem& problem, const std::vector<Keys>& sequences,
                             std::int64_t padding, Random& random) {
  const CacheShape& shape = *problem.cache;
  const std::int64_t columns = (problem.seqlen_k + shape.page_size - 1) / shape.page_size;
  stride_page_table = columns + random.next_between(0, padding);
  const std::int64_t rows = shape.rows > 0 ? shape.rows : problem.batch;
  std::vector<std::int64_t> order(size(shape.num_pages));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[size(random.next_between(0, static_cast<std::int64_t>(i) - 1))]);
  }
  constexpr std::int64_t kNobody = std::numeric_limits<std::int64_t>::min();
  page_table.assign(size(rows * stride_page_table), kNobody);
  // How many columns begin a row as they do the row above it: as in radix trees of prompts.
  std::vector<std::int64_t> shared(size(rows));
  for (std::int64_t& count : shared) {
    if (shape.prefix_levels == 0) break;
    count = one_of({0, columns / 4, columns / 2, columns - 1, columns}, random);
  }
  std::int64_t taken = 0;
  for (const Keys& keys : sequences) {
    for (std::int64_t slot = keys.begin; slot < keys.end;) {
      const std::int64_t column = slot / shape.page_size;
      slot = (column + 1) * shape.page_size;
      std::int64_t& page = page_table[size(keys.row * stride_page_table + column)];
      if (page != kNobody) continue;  // two sequences of one row
      const std::int64_t* const above = keys.row > 0 ? &page - stride_page_table : nullptr;
      if (above != nullptr && column < shared[size(keys.row)] && *above != kNobody) {
        page = *above;
        continue;
      }
      const bool fresh = taken == 0 || (taken < shape.num_pages && random.next_between(0, 7) > 0);
      page = order[size(fresh ? taken++ : random.next_between(0, taken - 1))];
      if (shape.skips && random.next_between(0, 3) == 0) page = one_of({-1, -2, kLeast}, random);
    }
  }
  for (std::int64_t& page : page_table) {
    if (page == kNobody) page = hostile(shape.num_pages, random);
  }
}

}  // namespace tessera::tools
