// Where keys lie in a cache of pages, or in its rows, and how many of them a sequence has (S13).
#pragma once

#include "core/divisor.h"
#include "core/sequences.h"

namespace tessera::core {

/// The pages of all sequences. A page's slots lie side by side along the tensors' seqlen dimension,
/// pages along the dimension of sequences.
struct Pages {
  const void* table = nullptr;  ///< [rows][stride] page numbers; null: no pages
  std::int64_t stride = 0;      ///< elements from one row to the next
  std::int64_t count = 0;       ///< pages that exist
  int size = 0;                 ///< slots
  PageIds ids = PageIds::i32;
  bool skips = false;  ///< nobody sees keys of pages with numbers below 0

  /// The number in a row's column, as it stands there.
  TESSERA_HD constexpr std::int64_t at(int row, int column) const {
    const std::int64_t index = row * stride + column;
    return ids == PageIds::i32 ? static_cast<const std::int32_t*>(table)[index]
                               : static_cast<const std::int64_t*>(table)[index];
  }
  /// Where a slot of a sequence is: in which column's page, and in which of the page's slots.
  struct Place {
    int column = 0, slot = 0;
  };
  TESSERA_HD constexpr Place place(int slot) const { return at_column(slot, slot / size); }
  /// by: the Divisor of `size`.
  TESSERA_HD constexpr Place place(int slot, const Divisor& by) const {
    return at_column(slot, by.quotient(slot));
  }
  TESSERA_HD constexpr bool exists(std::int64_t page) const { return page >= 0 && page < count; }
  friend constexpr bool operator==(const Pages&, const Pages&) = default;

 private:
  TESSERA_HD constexpr Place at_column(int slot, int column) const {
    return {.column = column, .slot = slot - column * size};
  }
};

/// Keys that lie side by side in one page and are fetched together: boxes divide pages and blocks
/// of block_n keys. Blocks count from a sequence's first key; leftpad: that may be in any slot.
TESSERA_HD constexpr int box_keys(int page_size, int block_n, bool leftpad) {
  if (leftpad) return 1;
  int keys = block_n;
  while (page_size % keys != 0 || block_n % keys != 0) --keys;
  return keys;
}

/// Elements from the start of k or v to a key's row.
TESSERA_HD constexpr std::int64_t slot_offset(const Pages& pages, const Sequence& sequence,
                                              const Strides& strides, int key, int head) {
  if (pages.table == nullptr) return sequence.key_offset(strides, key, head);
  const Pages::Place at = pages.place(sequence.first_k + key);
  return pages.at(sequence.entry_k, at.column) * strides.batch + at.slot * strides.seqlen +
         head * strides.head;
}

/// Reads a word as any other.
struct PlainRead {
  TESSERA_HD constexpr int operator()(const std::int32_t* from) const { return *from; }
};

/// Lengths and places of sequences in a cache.
struct Cache {
  bool used = false;                             ///< no: k and v are not a cache
  const std::int32_t* seqlens = nullptr;         ///< null: full
  const std::int32_t* cu_seqlens_new = nullptr;  ///< null: seqlen_new each
  const std::int32_t* index = nullptr;           ///< null: sequence b has row b
  const std::int32_t* leftpad = nullptr;         ///< null: none
  int seqlen_new = 0;                            ///< 0: lengths are after the append
  int capacity = 0;                              ///< slots of a sequence
  std::int64_t rows = 0;                         ///< that index may name
  Pages pages;

  /// Slots of a sequence that are filled, new keys included; less than 0: it is a no-op. read: of
  /// a word of memory.
  template <class Read = PlainRead>
  TESSERA_HD constexpr int filled(int batch, const Read& read = {}) const {
    if (seqlens == nullptr) return capacity;
    const int length = read(seqlens + batch);
    if (length < 0) return -1;
    const int more = cu_seqlens_new != nullptr
                         ? read(cu_seqlens_new + batch + 1) - read(cu_seqlens_new + batch)
                         : seqlen_new;
    return length > capacity - more ? capacity : length + more;
  }
  /// Gives a sequence its keys. What the cache does not have they are not: a row that does not
  /// exist, slots beyond its capacity. So whatever is read, no key lies outside of the cache.
  template <class Read = PlainRead>
  TESSERA_HD constexpr void place(Sequence& sequence, const Read& read = {}) const {
    if (!used) return;
    const int row = index != nullptr ? read(index + sequence.batch) : sequence.batch;
    const bool exists = index == nullptr || (row >= 0 && row < rows);
    const int pad = leftpad != nullptr ? max(read(leftpad + sequence.batch), 0) : 0;
    sequence.entry_k = exists ? row : 0;
    sequence.first_k = pad;
    sequence.seqlen_k = exists ? max(filled(sequence.batch, read) - pad, 0) : 0;
  }
  friend constexpr bool operator==(const Cache&, const Cache&) = default;
};

}  // namespace tessera::core
