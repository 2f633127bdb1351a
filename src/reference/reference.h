// The reference: what attention and its gradients are (S1-S14), as literal loops in double over the
// full score matrix. It shares nothing with core, so it judges the definition in core as well as
// the kernels. O(seqlen_q * seqlen_k) time, O(N) memory. Called by the checker and the tests only.
#pragma once

#include <vector>

#include "reference/inputs.h"

namespace tessera::reference {

/// Results without strides. Rows count over all sequences; empty where the problem has none.
struct Outputs {
  std::vector<double> o;      ///< [rows_q][num_heads][head_dim_v]
  std::vector<double> lse;    ///< [batch][num_heads][seqlen_q]; packed: [num_heads][total_q]
  std::vector<double> dq;     ///< [rows_q][num_heads][head_dim]
  std::vector<double> dk;     ///< [rows_k][num_heads_k][head_dim]
  std::vector<double> dv;     ///< [rows_k][num_heads_k][head_dim_v]
  std::vector<double> dbias;  ///< the stored dimensions of the bias, contiguous
  std::vector<double> dsink;  ///< [num_heads]
};

/// One query of one head.
struct Row {
  std::vector<double> p;      ///< [seqlen_k] softmax, 0 where masked
  std::vector<double> keep;   ///< [seqlen_k] dropout factor
  std::vector<double> slope;  ///< [seqlen_k] d score / d (q.k)
  double p_sink = 0.0;
  double lse = 0.0;  ///< -inf for a row that sees nothing
};

/// Which row: sequence s, batch b, query head h with its key/value head hk, query i, row of q and
/// o.
struct Place {
  const Sequence& s;
  std::int64_t b, h, hk, i, row;
};

/// Calls visit(Place) for every row of the output.
template <class Visit>
void for_each_row(const Inputs& inputs, const Visit& visit) {
  for (std::int64_t b = 0; b < inputs.problem().batch; ++b) {
    const Sequence& s = inputs.sequence(b);
    for (std::int64_t h = 0; h < inputs.problem().num_heads; ++h) {
      for (std::int64_t i = 0; i < s.seqlen_q; ++i) {
        visit(Place{s, b, h, inputs.head_k(h), i, s.first_q + i});
      }
    }
  }
}

Row softmax_row(const Inputs& inputs, const Place& at);

/// Outputs of the problem's sizes, all 0; the gradients only for a backward.
Outputs zeros(const Inputs& inputs);

/// The whole computation. A backward gives o and lse too, and ignores the o it was given.
Outputs attend(const Inputs& inputs);

}  // namespace tessera::reference
