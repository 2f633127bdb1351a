// Merging the parts of split keys (S7): every part left a normalised fp32 output and a natural-log
// lse; core::combine merges the states in the order of the splits, whoever computed them, the sink
// enters once, and the row is written. Called by the forward and decode kernels after all parts are
// done.
#pragma once

#include "core/softmax.h"
#include "cpu/copy.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

/// One row: out[j] = sum over the splits of weight * part[j].
template <class T>
TESSERA_INLINE void combine_row(const SplitLayout& parts, int splits, std::int64_t row,
                                std::int64_t rows, std::int64_t n,
                                const core::Softmax<float>& merged, T* out) {
  for (std::int64_t j = 0; j < n; j += kLanes) {
    const std::int64_t count = n - j < kLanes ? n - j : kLanes;
    F32 sum{};
    for (int s = 0; s < splits; ++s) {
      const std::int64_t part = s * rows + row;
      const float weight = core::weight_of(core::from_lse(parts.lse[part]), merged);
      sum = fma(load_n(parts.o + part * n + j, count), F32(weight), sum);
    }
    store_n(out + j, sum, count);
  }
}

/// Merges all rows of a call whose plan splits the keys.
inline void combine_splits(const Call& call) {
  core::WorkOrder work = call.plan.work;
  const int splits = work.splits;
  work.splits = 1;
  const SplitLayout& parts = call.layout.splits;
  for_each_task(call, work.count(), [&](std::int64_t index, int) {
    const core::Work item = work.at(index);
    const RowMap map(call, item.batch, item.head);
    const std::int64_t first = std::int64_t{item.block} * work.block_m;
    const std::int64_t last = core::min(first + work.block_m, map.rows.count());
    const Tensors& tensors = call.tensors;
    const std::int64_t rows = map.split_rows();
    for (std::int64_t r = first; r < last; ++r) {
      const RowMap::Row at = map.at(r);
      const int head = map.head_of(at);
      const std::int64_t row = map.split_row(at.query, head);
      core::Softmax<float> merged;
      for (int s = 0; s < splits; ++s) {
        merged = core::combine(merged, core::from_lse(parts.lse[s * rows + row]));
      }
      if (call.plan.problem.sink) {
        merged = core::combine(merged, {tensors.sink[head] * core::kLog2e, 1.0F});
      }
      if (tensors.softmax_lse != nullptr) {
        tensors.softmax_lse[map.lse_index(at.query, head)] = core::lse_of(merged);
      }
      with_storage(call.plan.problem.stored_o(), [&](auto storage) {
        using T = decltype(storage);
        T* out = static_cast<T*>(tensors.o.data) + map.offset(tensors.o, at.query, head);
        combine_row(parts, splits, row, rows, call.plan.problem.head_dim_v, merged, out);
      });
    }
  });
}

}  // namespace tessera::cpu::TESSERA_ISA
