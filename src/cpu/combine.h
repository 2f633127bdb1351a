// Merging the parts of split keys (S7): every part left a normalised output and a natural-log lse;
// core::combine merges the states in the order of the splits, whoever computed them, and the row is
// written. Called by the forward and decode kernels after all parts are done, where the sink enters
// once, and for partial results of the caller's.
#pragma once

#include "core/softmax.h"
#include "cpu/copy.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

/// A row of every split.
template <class T>
struct PartRows {
  const T* o;  ///< of the first split
  const float* lse;
  std::int64_t o_stride, lse_stride;  ///< from one split to the next
  int splits;

  TESSERA_INLINE core::Softmax<float> state(int split) const {
    return core::from_lse(lse[split * lse_stride]);
  }
  TESSERA_INLINE core::Softmax<float> merged() const {
    core::Softmax<float> all;
    for (int s = 0; s < splits; ++s) all = core::combine(all, state(s));
    return all;
  }
};

/// `count` columns of a row, as kVectors vectors; only a single one may be partial.
template <int kVectors, class P, class T>
TESSERA_INLINE void combine_columns(const PartRows<P>& parts, std::int64_t first,
                                    [[maybe_unused]] std::int64_t count,
                                    const core::Softmax<float>& merged, T* out) {
  F32 sum[kVectors] = {};
  for (int s = 0; s < parts.splits; ++s) {
    const float weight = core::weight_of(parts.state(s), merged);
    if (weight == 0.0F) continue;
    const P* const part = parts.o + s * parts.o_stride + first;
    if constexpr (kVectors == 1) {
      sum[0] = fma(load_n(part, count), F32(weight), sum[0]);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = fma(load(part + v * kLanes), F32(weight), sum[v]);
      }
    }
  }
  if constexpr (kVectors == 1) {
    store_n(out + first, sum[0], count);
  } else {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + first + v * kLanes, sum[v]);
  }
}

/// out[j] = sum over the splits of weight * part[j], j < n. What has no weight is not read. As many
/// columns at a time as registers hold: so often is a weight made anew.
template <class P, class T>
TESSERA_INLINE void combine_row(const PartRows<P>& parts, std::int64_t n,
                                const core::Softmax<float>& merged, T* out) {
  constexpr std::int64_t kMany = 8 * kLanes, kSome = 4 * kLanes;
  std::int64_t j = 0;
  for (; n - j >= kMany; j += kMany) combine_columns<8>(parts, j, kMany, merged, out);
  if (n - j >= kSome) {
    combine_columns<4>(parts, j, kSome, merged, out);
    j += kSome;
  }
  for (; j < n; j += kLanes) {
    combine_columns<1>(parts, j, core::min<std::int64_t>(n - j, kLanes), merged, out);
  }
}

/// Merges all rows of a call whose plan splits the keys.
inline void combine_splits(const Call& call) {
  core::WorkOrder work = call.plan.work;
  work.splits = 1;
  const SplitLayout& parts = call.layout.splits;
  const std::int64_t n = call.plan.problem.head_dim_v;
  const bool has_sink = call.plan.problem.sink;
  for_each_task(call, work.count(), [&](std::int64_t index, int) {
    const core::Work item = work.at(index);
    const RowMap map(call, item.batch, item.head);
    const std::int64_t first = std::int64_t{item.block} * work.block_m;
    const std::int64_t last = core::min(first + work.block_m, map.rows.count());
    const int splits =
        core::used_splits(map.mask.runs_of(map.rows.queries_of(first, last)), call.plan.split_n);
    const Tensors& tensors = call.tensors;
    const std::int64_t rows = map.split_rows();
    for (std::int64_t r = first; r < last; ++r) {
      const RowMap::Row at = map.at(r);
      const int head = map.head_of(at);
      const std::int64_t row = map.split_row(at.query, head);
      const PartRows<float> part = {parts.o + row * n, parts.lse + row, rows * n, rows, splits};
      const core::Softmax<float> merged =
          core::finish(part.merged(), has_sink, has_sink ? tensors.sink[head] : 0.0F).state;
      if (tensors.softmax_lse != nullptr) {
        tensors.softmax_lse[map.lse_index(at.query, head)] = core::lse_of(merged);
      }
      with_storage(call.plan.problem.stored_o(), [&](auto storage) {
        using T = decltype(storage);
        T* out = static_cast<T*>(tensors.o.data) + map.offset(tensors.o, at.query, head);
        combine_row(part, n, merged, out);
      });
    }
  });
}

/// Merges partial results of the caller's. P, T: of the parts and of o.
template <class P, class T>
void combine_rows(const CombineCall& call) {
  const PartialResults& results = call.results;
  const PartialTensors& t = call.tensors;
  const std::int64_t n = results.head_dim_v, heads = results.num_heads;
  // An item is worth a worker's while.
  constexpr std::int64_t kItemBytes = 1 << 16;
  const std::int64_t row_bytes = results.num_splits * n * static_cast<std::int64_t>(sizeof(P));
  const std::int64_t item = core::max<std::int64_t>(kItemBytes / row_bytes, 1);
  for_each_task(call, core::ceil_div(results.rows(), item), [&](std::int64_t index, int) {
    const std::int64_t last = core::min((index + 1) * item, results.rows());
    for (std::int64_t r = index * item; r < last; ++r) {
      const std::int64_t head = r % heads, query = r / heads % results.seqlen_q;
      const std::int64_t batch = r / heads / results.seqlen_q;
      const auto offset = [&](const auto& tensor) {
        return batch * tensor.stride_batch + query * tensor.stride_seqlen +
               head * tensor.stride_head;
      };
      const PartRows<P> part = {static_cast<const P*>(t.o_parts.data) + offset(t.o_parts),
                                t.lse_parts.data + offset(t.lse_parts), t.o_parts.stride_split,
                                t.lse_parts.stride_split, static_cast<int>(results.num_splits)};
      const core::Softmax<float> merged = part.merged();
      if (t.softmax_lse.data != nullptr) {
        t.softmax_lse.data[offset(t.softmax_lse)] = core::lse_of(merged);
      }
      combine_row(part, n, merged, static_cast<T*>(t.o.data) + offset(t.o));
    }
  });
}

inline void combine_partial(const CombineCall& call) {
  with_storage(call.results.dtype, [&](auto part) {
    with_storage(call.results.dtype_o,
                 [&](auto storage) { combine_rows<decltype(part), decltype(storage)>(call); });
  });
}

}  // namespace tessera::cpu::TESSERA_ISA
