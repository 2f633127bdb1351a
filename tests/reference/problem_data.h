// A tiny fp32 problem with contiguous random inputs, for the tests of the reference.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "reference/reference.h"

namespace tessera {

/// Owns the memory; change numbers, then call reference().
class ProblemData {
 public:
  ProblemData(const Problem& p, std::uint64_t seed, std::vector<std::int32_t> cu_q = {},
              std::vector<std::int32_t> cu_k = {})
      : problem(p), cu_seqlens_q(std::move(cu_q)), cu_seqlens_k(std::move(cu_k)) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& numbers, std::int64_t count) {
      numbers.resize(static_cast<std::size_t>(count));
      for (float& x : numbers) x = normal(engine);
    };
    fill(q, p.rows_q() * p.num_heads * p.head_dim);
    fill(k, p.rows_k() * p.num_heads_k * p.head_dim);
    fill(v, p.rows_k() * p.num_heads_k * p.head_dim_v);
    fill(dout, p.rows_q() * p.num_heads * p.head_dim_v);
    fill(dlse, p.rows_q() * p.num_heads);
    fill(sink, p.num_heads);
    fill(alibi_slopes, p.batch * p.num_heads);
    for (float& slope : alibi_slopes) slope = std::abs(slope);
    fill(bias, p.bias ? size_of_bias() : 0);
    o.resize(dout.size());
  }

  Tensors tensors() const {
    const Problem& p = problem;
    const auto rows = [&p](const std::vector<float>& x, std::int64_t seqlen, std::int64_t heads,
                           std::int64_t dim) -> ConstTensor {
      return {x.data(), p.packed ? 0 : seqlen * heads * dim, heads * dim, dim};
    };
    Tensors t;
    t.q = rows(q, p.seqlen_q, p.num_heads, p.head_dim);
    t.k = rows(k, p.seqlen_k, p.num_heads_k, p.head_dim);
    t.v = rows(v, p.seqlen_k, p.num_heads_k, p.head_dim_v);
    t.dout = rows(dout, p.seqlen_q, p.num_heads, p.head_dim_v);
    t.saved_o = rows(o, p.seqlen_q, p.num_heads, p.head_dim_v);
    t.dsoftmax_lse = dlse.data();
    if (p.sink) t.sink = sink.data();
    if (p.alibi != PerHead::none) t.alibi_slopes = alibi_slopes.data();
    if (p.packed) {
      t.cu_seqlens_q = cu_seqlens_q.data();
      t.cu_seqlens_k = cu_seqlens_k.data();
    }
    if (p.bias) {
      const BiasShape& b = *p.bias;
      t.bias.data = bias.data();
      t.bias.stride_key = 1;
      t.bias.stride_query = b.keys ? p.seqlen_k : 1;
      t.bias.stride_head = t.bias.stride_query * (b.queries ? p.seqlen_q : 1);
      t.bias.stride_batch = t.bias.stride_head * (b.heads ? p.num_heads : 1);
    }
    t.philox_seed = 0x0123456789ABCDEFU;
    t.philox_offset = 42;
    return t;
  }

  reference::Outputs reference() const { return reference::attend({problem, tensors()}); }

  Problem problem;
  std::vector<float> q, k, v, o, dout, dlse, sink, alibi_slopes, bias;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;

 private:
  std::int64_t size_of_bias() const {
    const BiasShape& b = *problem.bias;
    return (b.batch ? problem.batch : 1) * (b.heads ? problem.num_heads : 1) *
           (b.queries ? problem.seqlen_q : 1) * (b.keys ? problem.seqlen_k : 1);
  }
};

}  // namespace tessera
