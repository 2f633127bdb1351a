// The definition, in the order of S1. Every rule is cited where it acts.
#include "reference/reference.h"

#include <cmath>
#include <limits>

namespace tessera::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

double dot(const double* a, const double* b, std::int64_t n) {
  double even = 0.0, odd = 0.0;
  for (std::int64_t i = 0; i + 1 < n; i += 2) {
    even += a[i] * b[i];
    odd += a[i + 1] * b[i + 1];
  }
  return n % 2 == 0 ? even + odd : even + odd + a[n - 1] * b[n - 1];
}

/// y += factor * x
void add(double factor, const double* x, std::int64_t n, double* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

/// The gradients that one row contributes; `o` is not needed, delta is taken from its definition.
void backward_row(const Inputs& in, const Place& at, const Row& row, Outputs& out) {
  const Problem& p = in.problem();
  const auto& [s, b, h, hk, i, row_q] = at;
  const std::int64_t d = p.head_dim, dv = p.head_dim_v;
  const double* dout = in.dout(row_q, h);
  std::vector<double> dp(size(s.seqlen_k));
  double delta = -in.dlse(b, h, i);  // S5: lse is an output too
  for (std::int64_t j = 0; j < s.seqlen_k; ++j) {
    if (row.p[size(j)] == 0.0) continue;
    dp[size(j)] = row.keep[size(j)] * dot(dout, in.v(s.first_k + j, hk), dv);
    delta += row.p[size(j)] * dp[size(j)];
  }
  if (p.sink) out.dsink[size(h)] -= row.p_sink * delta;
  double* dq = &out.dq[size((row_q * p.num_heads + h) * d)];
  for (std::int64_t j = 0; j < s.seqlen_k; ++j) {
    if (row.p[size(j)] == 0.0) continue;
    const std::int64_t row_k = (s.first_k + j) * p.num_heads_k + hk;
    const double ds = row.p[size(j)] * (dp[size(j)] - delta);
    if (p.bias) out.dbias[size(in.bias_index(b, h, i, j))] += ds;
    const double dqk = ds * row.slope[size(j)];
    add(dqk, in.k(s.first_k + j, hk), d, dq);
    add(dqk, in.q(row_q, h), d, &out.dk[size(row_k * d)]);
    add(row.p[size(j)] * row.keep[size(j)], dout, dv, &out.dv[size(row_k * dv)]);
  }
}

}  // namespace

Row softmax_row(const Inputs& in, const Place& at) {
  const Problem& p = in.problem();
  const auto& [s, b, h, hk, i, row_q] = at;
  const auto n = size(s.seqlen_k);
  Row row{std::vector<double>(n, -kInfinity), std::vector<double>(n, 1.0), std::vector<double>(n),
          0.0, -kInfinity};
  const double scale = in.softmax_scale(), sink = in.sink(h);
  const auto cap = static_cast<double>(p.softcap);
  double top = sink;
  for (std::int64_t j = 0; j < s.seqlen_k; ++j) {
    if (!in.visible(s, i, j)) continue;
    const double qk = dot(in.q(row_q, h), in.k(s.first_k + j, hk), p.score_dim());
    double x = scale * (qk + in.score_shift(b, h, i));  // S14
    row.slope[size(j)] = scale;
    if (cap > 0.0) {
      const double cosh = std::cosh(x / cap);
      row.slope[size(j)] = scale / (cosh * cosh);  // 1 - tanh^2 would cancel
      x = cap * std::tanh(x / cap);
    }
    x += in.alibi(b, h, i, j) + in.bias(b, h, i, j);
    row.p[size(j)] = x;
    top = std::fmax(top, x);
  }
  if (top == -kInfinity) {  // S4: sees nothing
    row.p.assign(n, 0.0);
    return row;
  }
  const auto exp = [](double x) { return x == -kInfinity ? 0.0 : std::exp(x); };
  double sum = exp(sink - top);
  for (const double x : row.p) sum += exp(x - top);
  row.lse = top + std::log(sum);
  row.p_sink = exp(sink - row.lse);
  for (std::int64_t j = 0; j < s.seqlen_k; ++j) {
    row.p[size(j)] = exp(row.p[size(j)] - row.lse);
    if (row.p[size(j)] > 0.0) row.keep[size(j)] = in.dropout(b, h, i, j);
  }
  return row;
}

Outputs zeros(const Inputs& in) {
  const Problem& p = in.problem();
  Outputs out;
  out.o.assign(size(p.rows_q() * p.num_heads * p.head_dim_v), 0.0);
  out.lse.assign(size(p.rows_q() * p.num_heads), 0.0);
  if (p.pass == Pass::forward) return out;
  out.dq.assign(size(p.rows_q() * p.num_heads * p.head_dim), 0.0);
  out.dk.assign(size(p.rows_k() * p.num_heads_k * p.head_dim), 0.0);
  out.dv.assign(size(p.rows_k() * p.num_heads_k * p.head_dim_v), 0.0);
  out.dbias.assign(size(in.bias_size()), 0.0);
  out.dsink.assign(size(p.sink ? p.num_heads : 0), 0.0);
  return out;
}

Outputs attend(const Inputs& in) {
  const Problem& p = in.problem();
  Outputs out = zeros(in);
  for_each_row(in, [&](const Place& at) {
    const Row row = softmax_row(in, at);
    out.lse[size(in.lse_index(at.b, at.h, at.i))] = row.lse;
    double* o = &out.o[size((at.row * p.num_heads + at.h) * p.head_dim_v)];
    for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
      if (row.p[size(j)] == 0.0) continue;
      add(row.p[size(j)] * row.keep[size(j)], in.v(at.s.first_k + j, at.hk), p.head_dim_v, o);
    }
    const bool empty = row.lse == -kInfinity;  // S4: contributes no gradient
    if (p.pass == Pass::backward && !empty) backward_row(in, at, row, out);
  });
  return out;
}

}  // namespace tessera::reference
