// A page of a cache that does not exist holds zeros on a GPU (S13). No reference takes such a page
// table, so a page of zeros is lost while a kernel runs, and there again when it is judged.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check/inputs.h"

namespace tessera::device {

class LostPage {
 public:
  /// One that some sequence has, if there is one.
  LostPage(tools::RunMemory& memory, std::mt19937& random) {
    const Problem& p = memory.problem();
    const CacheTensors& cache = memory.tensors().cache;
    if (!p.cache || !p.cache->paged() || p.cache->num_pages == 0) return;
    const std::int64_t rows = p.cache->rows > 0 ? p.cache->rows : p.batch;
    table_ = cache.page_table;
    wide_ = p.cache->page_ids == PageIds::i64;
    const std::int64_t columns = (p.seqlen_k + p.cache->page_size - 1) / p.cache->page_size;
    std::vector<std::int64_t> there;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = 0; column < columns; ++column) {
        const std::int64_t at = row * cache.stride_page_table + column;
        if (number(at) >= 0 && number(at) < p.cache->num_pages) there.push_back(at);
      }
    }
    if (there.empty()) return;
    page_ = number(there[random() % there.size()]);
    for (const std::int64_t at : there) {
      if (number(at) == page_) entries_.push_back(at);
    }
    clear(memory.tensors().k, p.stored_k(), p, p.head_dim);
    clear(memory.tensors().v, p.stored_v(), p, p.head_dim_v);
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    // Below 0 it might be one that is skipped.
    const std::int64_t nowhere[] = {p.cache->num_pages, kMost,
                                    wide_ ? std::int64_t{1} << 32 : kMost,
                                    p.cache->skips ? kMost : -1};
    lost_ = nowhere[random() % 4];
    set(lost_);
  }
  /// Has nobody written to it, nor to the table?
  bool intact() const {
    for (const std::int64_t at : entries_) {
      if (number(at) != lost_) return false;
    }
    for (const Row& row : rows_) {
      for (std::size_t i = 0; i < row.bytes.size(); ++i) {
        if (row.at[i] != std::byte{0}) return false;
      }
    }
    return true;
  }
  /// It is there again.
  void find() { set(page_); }
  /// What it held, too.
  void fill() {
    // Heads may share memory: what was read first is what it held.
    for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) {
      std::memcpy(row->at, row->bytes.data(), row->bytes.size());
    }
    rows_.clear();
  }

 private:
  struct Row {
    std::byte* at;
    std::vector<std::byte> bytes;
  };

  std::int64_t number(std::int64_t at) const {
    return wide_ ? static_cast<const std::int64_t*>(table_)[at]
                 : static_cast<const std::int32_t*>(table_)[at];
  }
  void set(std::int64_t number) {
    auto* const table = const_cast<void*>(table_);
    for (const std::int64_t at : entries_) {
      if (wide_) {
        static_cast<std::int64_t*>(table)[at] = number;
      } else {
        static_cast<std::int32_t*>(table)[at] = static_cast<std::int32_t>(number);
      }
    }
  }
  void clear(const ConstTensor& x, Dtype dtype, const Problem& p, std::int64_t dim) {
    const std::int64_t width = size_of(dtype);
    auto* const data = static_cast<std::byte*>(const_cast<void*>(x.data));
    for (std::int64_t slot = 0; slot < p.cache->page_size; ++slot) {
      for (std::int64_t head = 0; head < p.num_heads_k; ++head) {
        for (std::int64_t i = 0; i < dim; ++i) {
          std::byte* const at =
              data +
              (page_ * x.stride_batch + slot * x.stride_seqlen + head * x.stride_head + i) * width;
          rows_.push_back({at, {at, at + width}});
          std::memset(at, 0, static_cast<std::size_t>(width));
        }
      }
    }
  }

  const void* table_ = nullptr;
  bool wide_ = false;
  std::int64_t page_ = 0, lost_ = 0;   ///< and what the table says instead
  std::vector<std::int64_t> entries_;  ///< of the table, that have the page
  std::vector<Row> rows_;              ///< what it held
};

}  // namespace tessera::device
