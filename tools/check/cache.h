// Where the sequences of a random cache lie (S13): lengths from a no-op to the capacity, pages in
// random order, some in several sequences, rows by index, left padding. What nobody may read is
// hostile: numbers of pages and rows that do not exist.
#pragma once

#include <cstdint>
#include <vector>

#include "check/random.h"
#include "tessera/problem.hpp"

namespace tessera::tools {

/// CacheTensors as numbers; empty: none.
struct CacheLayout {
  std::vector<std::int32_t> seqlens, cu_seqlens_new, index, leftpad;
  std::vector<std::int64_t> page_table;
  std::int64_t stride_page_table = 0;
  std::vector<bool> used;  ///< [rows or pages][slots] a sequence has a key there

  /// Rows of the page table end with up to `padding` numbers that nobody may read. A cache of pages
  /// of which none exists has no keys.
  CacheLayout(const Problem& problem, std::int64_t padding, Random& random);

 private:
  /// Slots [begin, end) of a row hold a sequence's keys.
  struct Keys {
    std::int64_t row = 0, begin = 0, end = 0;
  };

  Keys draw_sequence(const Problem& problem, std::int64_t batch, Random& random);
  void draw_pages(const Problem& problem, const std::vector<Keys>& sequences, std::int64_t padding,
                  Random& random);
};

}  // namespace tessera::tools
