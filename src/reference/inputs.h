// The inputs of one problem, read into memory as plain numbers: every stride, packed layout, page,
// broadcast and storage type is resolved here, so that the loops of the reference and of the naive
// computation contain mathematics only. Shares nothing with core.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/dropout.h"
#include "tessera/tensors.hpp"

namespace tessera::reference {

/// Where a sequence lies among the rows of q (first_q), and among the keys of all sequences, which
/// are counted one sequence after another (first_k).
struct Sequence {
  std::int64_t first_q = 0, first_k = 0, seqlen_q = 0, seqlen_k = 0;
};

class Inputs {
 public:
  /// Reads q, the keys and values that sequences have, and the options; for a backward also dout, o
  /// and dsoftmax_lse.
  Inputs(const Problem& problem, const Tensors& tensors);

  const Problem& problem() const { return problem_; }
  const Sequence& sequence(std::int64_t batch) const {
    return sequences_[static_cast<std::size_t>(batch)];
  }
  /// S10.
  std::int64_t head_k(std::int64_t head) const {
    return head / (problem_.num_heads / problem_.num_heads_k);
  }
  double softmax_scale() const;

  /// S14: what is added to q . k of a row, and to a column of v; 0 without.
  double score_shift(std::int64_t batch, std::int64_t head, std::int64_t query) const;
  double v_shift(std::int64_t batch, std::int64_t head_k, std::int64_t column) const;

  /// One row: score_dim (q, k) or head_dim_v (v, o, dout) numbers; with qv its columns follow q's,
  /// and v's follow k's. Rows count over all sequences;
  /// a key that lies in the pages of two sequences is a row of each.
  const double* q(std::int64_t row, std::int64_t head) const { return at(q_, row, head); }
  const double* k(std::int64_t row, std::int64_t head_k) const { return at(k_, row, head_k); }
  const double* v(std::int64_t row, std::int64_t head_k) const { return at(v_, row, head_k); }
  const double* o(std::int64_t row, std::int64_t head) const { return at(o_, row, head); }
  const double* dout(std::int64_t row, std::int64_t head) const { return at(dout_, row, head); }

  /// Of 8 bits (S14): the elements of a row as they are stored, and the scales that make values of
  /// them. Packed or not, rows count as above.
  /// @{
  const double* q_elements(std::int64_t row, std::int64_t head) const {
    return at(q_elements_, row, head);
  }
  const double* k_elements(std::int64_t row, std::int64_t head_k) const {
    return at(k_elements_, row, head_k);
  }
  const double* v_elements(std::int64_t row, std::int64_t head_k) const {
    return at(v_elements_, row, head_k);
  }
  double q_scale(std::int64_t batch, std::int64_t head, std::int64_t query) const;
  double k_scale(std::int64_t batch, std::int64_t head_k, std::int64_t key) const;
  double v_scale(std::int64_t batch, std::int64_t head_k, std::int64_t key,
                 std::int64_t column) const;
  /// @}

  /// S2, S3.
  bool visible(const Sequence& sequence, std::int64_t query, std::int64_t key) const;
  /// Element of the bias tensor, 0 without one.
  double bias(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key) const;
  /// S6.
  double alibi(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key) const;
  /// -inf without a sink.
  double sink(std::int64_t head) const;
  /// S8.
  double dropout(std::int64_t batch, std::int64_t head, std::int64_t query,
                 std::int64_t key) const {
    return dropout_.factor(batch, head, query, key);
  }
  double dlse(std::int64_t batch, std::int64_t head, std::int64_t query) const;

  /// Most rows that may be copies of one another, because q or dout repeats them (stride 0).
  double copies() const;

  /// Where softmax_lse keeps a row (S5), and where a contiguous dbias keeps an element.
  std::int64_t lse_index(std::int64_t batch, std::int64_t head, std::int64_t query) const;
  std::int64_t bias_index(std::int64_t batch, std::int64_t head, std::int64_t query,
                          std::int64_t key) const;
  std::int64_t bias_size() const;

 private:
  struct Rows {
    std::vector<double> data;
    std::int64_t heads = 0, dim = 0;
  };
  static const double* at(const Rows& rows, std::int64_t row, std::int64_t head) {
    return rows.data.data() + (row * rows.heads + head) * rows.dim;
  }
  /// Rows of all sequences of so many each; offset(tensor, batch, number): elements to one.
  template <class Offset>
  Rows read(const ConstTensor& tensor, Dtype dtype, std::int64_t Sequence::* length,
            const Offset& offset, std::int64_t heads, std::int64_t dim) const;
  /// Every row gets more columns.
  static void append(Rows& rows, const Rows& more);
  /// S14: v where it lies in tiles.
  Rows read_value_tiles() const;
  /// S14: elements become values. value(x, batch, head, number, column): of element x.
  template <class Value>
  void adjust(Rows& rows, std::int64_t Sequence::* length, const Value& value) const;
  void adjust_all();
  /// S14: of k or v by token.
  /// number: of those that a slot has.
  double slot_scale(const ConstScales& scales, std::int64_t batch, std::int64_t head_k,
                    std::int64_t key, std::int64_t number) const;
  double scale(const ConstScales& scales, Scaling by, std::int64_t block, std::int64_t batch,
               std::int64_t head, std::int64_t row, std::int64_t column) const;

  /// S13: slots of a cache that hold a sequence's keys, or come before them; below 0: a no-op.
  std::int64_t filled_slots(std::int64_t batch) const;
  std::int64_t first_slot(std::int64_t batch) const;
  /// S13: the number of a slot's page.
  std::int64_t page_of(std::int64_t batch, std::int64_t slot) const;
  /// S13: whether the key's page is one that the table skips.
  bool skipped(std::int64_t batch, std::int64_t key) const;
  /// Elements from the start of k or v to a key of head 0 (S11, S13).
  std::int64_t key_offset(const ConstTensor& tensor, std::int64_t batch, std::int64_t key) const;

  Problem problem_;
  Tensors tensors_;
  Dropout dropout_;
  std::vector<Sequence> sequences_;
  Rows q_, k_, v_, o_, dout_;
  Rows q_elements_, k_elements_, v_elements_;
};

}  // namespace tessera::reference
