// Pages of a sequence that a table does not skip (S13): numbers below 0 are no pages, and their
// keys nobody's. The others keep their order, so that the one which may not be full stays the last.
#pragma once

#include "core/pages.h"

namespace tessera::core {

/// Columns of the page table that a sequence has.
TESSERA_HD constexpr int page_columns(const Pages& pages, const Sequence& sequence) {
  return ceil_div(sequence.seqlen_k, pages.size);
}
/// Keys of `kept` pages, the sequence's last among them or not.
TESSERA_HD constexpr int keys_of_pages(const Pages& pages, const Sequence& sequence, int kept,
                                       bool has_last) {
  const int lacking = page_columns(pages, sequence) * pages.size - sequence.seqlen_k;
  return kept * pages.size - (has_last ? lacking : 0);
}

/// Tells keep(i, number) of every page that is not skipped, the i-th. Returns their keys.
template <class Keep>
TESSERA_HD constexpr int keep_pages(const Pages& pages, const Sequence& sequence,
                                    const Keep& keep) {
  const int columns = page_columns(pages, sequence);
  int kept = 0;
  bool has_last = false;
  for (int column = 0; column < columns; ++column) {
    const std::int64_t page = pages.at(sequence.entry_k, column);
    has_last = page >= 0;
    if (has_last) keep(kept++, page);
  }
  return keys_of_pages(pages, sequence, kept, has_last);
}

}  // namespace tessera::core
