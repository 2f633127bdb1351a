// Where the rows of a work item lie: addresses of the grouped rows (core::Rows) of one batch entry
// and one key/value head in q, o, softmax_lse and the split results. Forward, decode and combine
// share it.
#pragma once

#include "cpu/call.h"
#include "cpu/simd.h"

namespace tessera::cpu::TESSERA_ISA {

struct RowMap {
  const Problem& problem;
  const Tensors& tensors;
  core::Sequence sequence;
  core::SequenceMask mask;
  core::Pages pages;
  core::Rows rows;
  int batch;
  int head_k;

  TESSERA_INLINE RowMap(const Call& call, int batch_index, int head_k_index)
      : problem(call.plan.problem),
        tensors(call.tensors),
        sequence(sequence_of(call.plan.problem, call.tensors, batch_index)),
        mask(mask_rules_of(call.plan.problem, call.tensors)
                 .of(sequences_of(call.plan.problem, call.tensors), sequence)),
        pages(cache_of(call.plan.problem, call.tensors).pages),
        rows{sequence.seqlen_q,
             static_cast<int>(call.plan.problem.num_heads / call.plan.problem.num_heads_k)},
        batch(batch_index),
        head_k(head_k_index) {}

  /// A row, with its divisions done; next() walks without any.
  struct Row {
    int query;
    int member;  ///< of the group
  };
  TESSERA_INLINE Row at(std::int64_t row) const {
    return {rows.query_of(row), rows.member_of(row)};
  }
  TESSERA_INLINE Row next(Row row) const {
    return row.member + 1 < rows.group ? Row{row.query, row.member + 1} : Row{row.query + 1, 0};
  }
  TESSERA_INLINE int head_of(Row row) const { return head_k * rows.group + row.member; }

  /// Elements from the start of a tensor with q's layout to the row.
  template <class T>
  TESSERA_INLINE std::int64_t offset(const T& tensor, int query, int head) const {
    return sequence.query_offset(strides_of(tensor), query, head);
  }
  /// Elements from the start of k or v to key 0 of this sequence and head; not of pages.
  TESSERA_INLINE std::int64_t key_offset(const ConstTensor& tensor) const {
    return sequence.key_offset(strides_of(tensor), 0, head_k);
  }
  TESSERA_INLINE core::BiasStrides bias_strides() const {
    return strides_of(*problem.bias, tensors.bias);
  }
  /// ALiBi's slope of a head, and the key position that it takes for a query's (S6).
  TESSERA_INLINE float alibi_slope(int head) const {
    const std::int64_t first =
        problem.alibi == PerHead::batch_heads ? batch * problem.num_heads : 0;
    return tensors.alibi_slopes[first + head];
  }
  TESSERA_INLINE int position_of(int query) const {
    return query + sequence.seqlen_k - sequence.seqlen_q;
  }
  /// Index into softmax_lse.
  TESSERA_INLINE std::int64_t lse_index(int query, int head) const {
    return sequence.lse_index(lse_head_of(problem), static_cast<int>(problem.num_heads), head,
                              query);
  }
  /// Row of SplitLayout, before the split's own offset of split_rows().
  TESSERA_INLINE std::int64_t split_row(int query, int head) const {
    return sequences_of(problem, tensors).row_of(sequence, query) * problem.num_heads + head;
  }
  TESSERA_INLINE std::int64_t split_rows() const { return problem.rows_q() * problem.num_heads; }
};

}  // namespace tessera::cpu::TESSERA_ISA
