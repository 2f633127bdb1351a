// Scalar access to a problem as the tile simulator's loops see it.
#pragma once

#include "core/philox.h"
#include "core/softmax.h"
#include "plan/plan.h"

namespace tessera::tile {

/// Scalar access to the tensors of one (batch, key/value head).
class Head {
 public:
  Head(const PlanData& plan, const Tensors& tensors, int batch, int head_k)
      : plan_(plan),
        p_(plan.problem),
        t_(tensors),
        batch_(batch),
        kernel_head_(head_k),
        sequence_(sequence_of(plan.problem, tensors, batch)),
        pages_(cache_of(plan.problem, tensors).pages),
        mask_(mask_rules_of(plan.problem, tensors)
                  .of(sequences_of(plan.problem, tensors), sequence_)),
        rows_{sequence_.seqlen_q, plan.row_heads},
        dropout_(core::make_dropout(p_.dropout_p, t_.philox_seed, t_.philox_offset)) {}

  const core::Sequence& sequence() const { return sequence_; }
  const core::SequenceMask& mask() const { return mask_; }
  const core::Band& band() const { return mask_.band; }
  const core::Rows& rows() const { return rows_; }
  const core::Score& score() const { return plan_.score; }
  int batch() const { return batch_; }

  int head_of(std::int64_t row) const { return kernel_head_ * rows_.group + rows_.member_of(row); }
  int head_k() const { return kernel_head_ * rows_.group / static_cast<int>(p_.group()); }
  /// (row of q over all sequences) * num_heads + head.
  std::size_t flat(std::int64_t row) const {
    const std::int64_t first = sequence_.entry() * p_.seqlen_q + sequence_.first_q;
    return static_cast<std::size_t>((first + rows_.query_of(row)) * p_.num_heads + head_of(row));
  }
  std::size_t flat_k(int key) const {
    const std::int64_t first = sequence_.entry() * p_.seqlen_k + sequence_.first_k;
    return static_cast<std::size_t>((first + key) * p_.num_heads_k + head_k());
  }

  const float* q(std::int64_t row) const { return query_row(t_.q, row); }
  const float* qv(std::int64_t row) const { return query_row(t_.qv, row); }
  const float* o(std::int64_t row) const { return query_row(t_.saved_o, row); }
  const float* dout(std::int64_t row) const { return query_row(t_.dout, row); }
  const float* k(int key) const { return key_row(t_.k, key); }
  const float* v(int key) const { return key_row(t_.v, key); }

  const core::Pages& pages() const { return pages_; }
  /// Where a key lies in a page.
  core::Pages::Place place(int key) const { return pages_.place(sequence_.first_k + key); }

  float lse(std::int64_t row) const { return t_.saved_softmax_lse[lse_index(row)]; }
  float dlse(std::int64_t row) const {
    return t_.dsoftmax_lse == nullptr ? 0.0F : t_.dsoftmax_lse[lse_index(row)];
  }
  float sink2(std::int64_t row) const {
    return p_.sink ? t_.sink[head_of(row)] * core::kLog2e : -core::kInfinity;
  }

  /// The base-2 score of S1 before the mask; slope: d(score)/d(q.k) without softmax_scale.
  float score2(std::int64_t row, int key, float* slope = nullptr) const {
    float qk = 0.0F;
    for (std::int64_t c = 0; c < p_.head_dim; ++c) qk += q(row)[c] * k(key)[c];
    for (std::int64_t c = 0; p_.qv && c < p_.head_dim_v; ++c) qk += qv(row)[c] * v(key)[c];
    if (slope != nullptr) {
      *slope = plan_.score.capped ? core::score_slope(plan_.score, qk) : 1.0F;
    }
    const float s = core::score2(plan_.score, qk);
    const int query = rows_.query_of(row), head = head_of(row);
    const float bias2 = p_.bias ? bias(query, head, key) * core::kLog2e : 0.0F;
    const bool alibi = p_.alibi != PerHead::none;
    const std::int64_t b = p_.alibi == PerHead::batch_heads ? batch_ : 0;
    const float alibi_slope = alibi ? t_.alibi_slopes[b * p_.num_heads + head] : 0.0F;
    const int distance = query + sequence_.seqlen_k - sequence_.seqlen_q - key;
    return core::add_to_score(s, p_.bias.has_value(), bias2, alibi, alibi_slope,
                              static_cast<float>(distance < 0 ? -distance : distance));
  }

  /// What dropout multiplies a probability with.
  float keep(std::int64_t row, int key) const {
    if (!dropout_.active()) return 1.0F;
    return core::dropout_keeps(dropout_, batch_, head_of(row), rows_.query_of(row), key)
               ? dropout_.keep_scale
               : 0.0F;
  }

 private:
  const float* query_row(const ConstTensor& t, std::int64_t row) const {
    return static_cast<const float*>(t.data) +
           sequence_.query_offset(strides_of(t), rows_.query_of(row), head_of(row));
  }
  const float* key_row(const ConstTensor& t, int key) const {
    return static_cast<const float*>(t.data) +
           core::slot_offset(pages_, sequence_, strides_of(t), key, head_k());
  }
  std::int64_t lse_index(std::int64_t row) const {
    return sequence_.lse_index(lse_head_of(p_), static_cast<int>(p_.num_heads), head_of(row),
                               rows_.query_of(row));
  }
  float bias(int query, int head, int key) const {
    return static_cast<const float*>(
        t_.bias.data)[strides_of(*p_.bias, t_.bias).offset(batch_, head, query, key)];
  }

  const PlanData& plan_;
  const Problem& p_;
  const Tensors& t_;
  int batch_;
  int kernel_head_;  ///< of the work's: PlanData::row_heads query heads
  core::Sequence sequence_;
  core::Pages pages_;
  core::SequenceMask mask_;
  core::Rows rows_;
  core::Dropout dropout_;
};

}  // namespace tessera::tile
