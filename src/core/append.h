// Where new rows and their scales go in a cache (S13, S14), and at which positions keys and queries
// are rotated. Backends and validation ask here.
#pragma once

#include "core/divisor.h"
#include "core/scales.h"

namespace tessera::core {

/// Rows of all sequences, one after another.
struct SequenceRows {
  const std::int32_t* cu_seqlens = nullptr;  ///< null: seqlen each
  Divisor seqlen;
  int batch = 0;

  /// A row by its sequence, and its place there. batch < 0: it is of none.
  struct Row {
    int batch, index;
  };

  TESSERA_HD constexpr int count(int b) const {
    return cu_seqlens == nullptr ? seqlen.value() : cu_seqlens[b + 1] - cu_seqlens[b];
  }
  TESSERA_HD constexpr Row of(std::int64_t row) const {
    if (cu_seqlens == nullptr) {
      return {static_cast<int>(seqlen.quotient(row)), seqlen.remainder(row)};
    }
    int b = 0;  // the last one that begins at the row or before
    for (int end = batch; end - b > 1;) {
      const int middle = b + (end - b) / 2;
      (cu_seqlens[middle] <= row ? b : end) = middle;
    }
    const std::int64_t index = row - cu_seqlens[b];
    const bool there = index >= 0 && row < cu_seqlens[b + 1];
    return {there ? b : -1, there ? static_cast<int>(index) : 0};
  }
  friend constexpr bool operator==(const SequenceRows&, const SequenceRows&) = default;
};

/// Elements from the start of a tensor to a row of all sequences; seqlen: rows of a sequence, 0 of
/// a packed tensor.
TESSERA_HD constexpr std::int64_t row_offset(const Strides& strides, const Divisor& seqlen,
                                             std::int64_t row) {
  if (seqlen.value() == 0) return row * strides.seqlen;
  const std::int64_t batch = seqlen.quotient(row);
  return batch * strides.batch + (row - batch * seqlen.value()) * strides.seqlen;
}

/// A slot by the row or page that has it.
struct Slot {
  std::int64_t entry = -1;  ///< less than 0: there is no such slot
  int index = 0;            ///< in its row or page

  TESSERA_HD constexpr bool exists() const { return entry >= 0; }
  /// Elements from the start of k or v.
  TESSERA_HD constexpr std::int64_t offset(const Strides& strides, int head) const {
    return entry * strides.batch + index * strides.seqlen + head * strides.head;
  }
};

/// Places and positions of all rows of an append.
struct Append {
  Cache cache;         ///< lengths without new rows among them unless `after`
  bool after = false;  ///< lengths count the new rows
  SequenceRows queries, added;
  const std::int64_t* slot_mapping = nullptr;    ///< null: by lengths
  std::int64_t entries = 0;                      ///< rows or pages
  Divisor entry_slots, page_size;                ///< of each
  const std::int32_t* rotary_seqlens = nullptr;  ///< null: positions are slots
  const void* positions = nullptr;               ///< of every row; null: by sequences
  PositionType position_type = PositionType::i32;
  bool constant_q = false;

  /// A sequence that is left alone.
  TESSERA_HD constexpr bool idle(int b) const {
    const int length = cache.seqlens[b];
    return after ? length <= 0 : length < 0;
  }
  /// To which the sequence's first new row goes; less than 0: lengths count fewer than there are.
  TESSERA_HD constexpr std::int64_t first_slot(int b) const {
    return std::int64_t{cache.seqlens[b]} - (after ? added.count(b) : 0);
  }
  /// The row of the cache or of the page table.
  TESSERA_HD constexpr int row_of(int b) const {
    return cache.index != nullptr ? cache.index[b] : b;
  }
  /// Where a slot of the sequence lies.
  TESSERA_HD constexpr Slot place(int b, std::int64_t slot) const {
    if (slot < 0 || slot >= cache.capacity) return {};
    const int row = row_of(b);
    if (cache.index != nullptr && (row < 0 || row >= cache.rows)) return {};
    const int at = static_cast<int>(slot);
    if (cache.pages.table == nullptr) return {row, at};
    const std::int64_t page = cache.pages.at(row, page_size.quotient(at));
    return cache.pages.exists(page) ? Slot{page, page_size.remainder(at)} : Slot{};
  }
  /// Where a new row goes.
  TESSERA_HD constexpr Slot slot_of(std::int64_t row) const {
    if (slot_mapping != nullptr) {
      const std::int64_t number = slot_mapping[row];
      if (number < 0 || entries == 0) return {};
      const std::int64_t entry = entry_slots.quotient(number);
      if (entry >= entries) return {};
      return {entry, static_cast<int>(number - entry * entry_slots.value())};
    }
    const SequenceRows::Row at = added.of(row);
    if (at.batch < 0 || idle(at.batch)) return {};
    return place(at.batch, first_slot(at.batch) + at.index);
  }
  /// From the first of the scales of k or v to that of a head of new row `row`, which goes to the
  /// slot; heads lie `stride_head` apart. With slot_mapping rows are of no sequence: heads have one
  /// scale each.
  TESSERA_HD constexpr std::int64_t scale_offset(const Scales& scales, std::int64_t row,
                                                 const Slot& slot, int head) const {
    if (scales.of_slots()) return slot.offset(scales.strides(), head);
    const bool of_none = slot_mapping != nullptr || scales.stride_batch == 0;
    const std::int64_t batch = of_none ? 0 : added.of(row).batch;
    return batch * scales.stride_batch + head * scales.stride_head;
  }
  /// Of new row or query `row`, which are `rows`; less than 0: it has none. What it has need not be
  /// in the tables.
  TESSERA_HD constexpr std::int64_t position_of(const SequenceRows& rows, std::int64_t row,
                                                bool constant) const {
    if (positions != nullptr) {
      return position_type == PositionType::i32 ? static_cast<const std::int32_t*>(positions)[row]
                                                : static_cast<const std::int64_t*>(positions)[row];
    }
    const SequenceRows::Row at = rows.of(row);
    if (at.batch < 0 || idle(at.batch)) return -1;
    const std::int64_t start =
        rotary_seqlens != nullptr ? rotary_seqlens[at.batch] : first_slot(at.batch);
    return start + (constant ? 0 : at.index);
  }
  TESSERA_HD constexpr std::int64_t position_of_new(std::int64_t row) const {
    return position_of(added, row, false);
  }
  TESSERA_HD constexpr std::int64_t position_of_query(std::int64_t row) const {
    return position_of(queries, row, constant_q);
  }
  friend constexpr bool operator==(const Append&, const Append&) = default;
};

}  // namespace tessera::core
