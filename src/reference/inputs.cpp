// Reading of tensors by their strides (S11), and the small rules that need no arithmetic.
#include "reference/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "reference/storage.h"

namespace tessera::reference {

Inputs::Inputs(const Problem& problem, const Tensors& tensors)
    : problem_(problem),
      tensors_(tensors),
      dropout_(problem.dropout_p, tensors.philox_seed, tensors.philox_offset) {
  const Problem& p = problem_;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    if (p.packed) {
      const std::int64_t q0 = tensors.cu_seqlens_q[b], q1 = tensors.cu_seqlens_q[b + 1];
      const std::int64_t k0 = tensors.cu_seqlens_k[b], k1 = tensors.cu_seqlens_k[b + 1];
      sequences_.push_back({q0, k0, q1 - q0, k1 - k0});
    } else {
      sequences_.push_back({b * p.seqlen_q, b * p.seqlen_k, p.seqlen_q, p.seqlen_k});
    }
  }
  q_ = read(tensors.q, p.dtype, true, p.num_heads, p.head_dim);
  k_ = read(tensors.k, p.dtype, false, p.num_heads_k, p.head_dim);
  v_ = read(tensors.v, p.dtype, false, p.num_heads_k, p.head_dim_v);
  if (p.pass == Pass::backward) {
    o_ = read(tensors.saved_o, p.stored_o(), true, p.num_heads, p.head_dim_v);
    dout_ = read(tensors.dout, p.stored_o(), true, p.num_heads, p.head_dim_v);
  }
}

Inputs::Rows Inputs::read(const ConstTensor& tensor, Dtype dtype, bool of_queries,
                          std::int64_t heads, std::int64_t dim) const {
  Rows rows{{}, heads, dim};
  rows.data.reserve(
      static_cast<std::size_t>((of_queries ? problem_.rows_q() : problem_.rows_k()) * heads * dim));
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const Sequence& s = sequence(b);
    const std::int64_t length = of_queries ? s.seqlen_q : s.seqlen_k;
    for (std::int64_t i = 0; i < length; ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t start =
            problem_.packed ? ((of_queries ? s.first_q : s.first_k) + i) * tensor.stride_seqlen
                            : b * tensor.stride_batch + i * tensor.stride_seqlen;
        for (std::int64_t x = 0; x < dim; ++x) {
          rows.data.push_back(load(dtype, tensor.data, start + h * tensor.stride_head + x));
        }
      }
    }
  }
  return rows;
}

double Inputs::softmax_scale() const {
  if (problem_.softmax_scale) return static_cast<double>(*problem_.softmax_scale);
  return 1.0 / std::sqrt(static_cast<double>(problem_.head_dim));
}

bool Inputs::visible(const Sequence& s, std::int64_t query, std::int64_t key) const {
  const bool bottom_right = problem_.alignment == Alignment::bottom_right;
  const std::int64_t position = bottom_right ? query + s.seqlen_k - s.seqlen_q : query;
  const bool left = problem_.window_left < 0 || key >= position - problem_.window_left;
  const bool right = problem_.window_right < 0 || key <= position + problem_.window_right;
  return left && right;
}

double Inputs::bias(std::int64_t batch, std::int64_t head, std::int64_t query,
                    std::int64_t key) const {
  if (!problem_.bias) return 0.0;
  const BiasShape& shape = *problem_.bias;
  std::int64_t index = 0;
  if (shape.batch) index += batch * tensors_.bias.stride_batch;
  if (shape.heads) index += head * tensors_.bias.stride_head;
  if (shape.queries) index += query * tensors_.bias.stride_query;
  if (shape.keys) index += key * tensors_.bias.stride_key;
  return load(shape.dtype, tensors_.bias.data, index);
}

double Inputs::alibi(std::int64_t batch, std::int64_t head, std::int64_t query,
                     std::int64_t key) const {
  if (problem_.alibi == PerHead::none) return 0.0;
  const std::int64_t row = problem_.alibi == PerHead::batch_heads ? batch : 0;
  const auto slope = static_cast<double>(tensors_.alibi_slopes[row * problem_.num_heads + head]);
  const Sequence& s = sequence(batch);
  return -slope * static_cast<double>(std::llabs(query + s.seqlen_k - s.seqlen_q - key));
}

double Inputs::sink(std::int64_t head) const {
  return problem_.sink ? static_cast<double>(tensors_.sink[head])
                       : -std::numeric_limits<double>::infinity();
}

double Inputs::dlse(std::int64_t batch, std::int64_t head, std::int64_t query) const {
  if (tensors_.dsoftmax_lse == nullptr) return 0.0;
  return static_cast<double>(tensors_.dsoftmax_lse[lse_index(batch, head, query)]);
}

double Inputs::copies() const {
  const auto along = [](std::int64_t q, std::int64_t dout, std::int64_t count) {
    return q == 0 || dout == 0 ? static_cast<double>(std::max<std::int64_t>(count, 1)) : 1.0;
  };
  const ConstTensor &q = tensors_.q, &dout = tensors_.dout;
  return (problem_.packed ? 1.0 : along(q.stride_batch, dout.stride_batch, problem_.batch)) *
         along(q.stride_seqlen, dout.stride_seqlen, problem_.seqlen_q) *
         along(q.stride_head, dout.stride_head, problem_.num_heads);
}

std::int64_t Inputs::lse_index(std::int64_t batch, std::int64_t head, std::int64_t query) const {
  if (problem_.packed) return head * problem_.total_q + sequence(batch).first_q + query;
  return (batch * problem_.num_heads + head) * problem_.seqlen_q + query;
}

std::int64_t Inputs::bias_index(std::int64_t batch, std::int64_t head, std::int64_t query,
                                std::int64_t key) const {
  const BiasShape& shape = *problem_.bias;
  std::int64_t index = shape.batch ? batch : 0;
  if (shape.heads) index = index * problem_.num_heads + head;
  if (shape.queries) index = index * problem_.seqlen_q + query;
  if (shape.keys) index = index * problem_.seqlen_k + key;
  return index;
}

std::int64_t Inputs::bias_size() const {
  if (!problem_.bias) return 0;
  const BiasShape& shape = *problem_.bias;
  return (shape.batch ? problem_.batch : 1) * (shape.heads ? problem_.num_heads : 1) *
         (shape.queries ? problem_.seqlen_q : 1) * (shape.keys ? problem_.seqlen_k : 1);
}

}  // namespace tessera::reference
