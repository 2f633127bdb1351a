// Forward: S = QK^T, then scale, softcap, bias, mask; P = softmax(S); O = PV. Backward: dP = dO
// V^T, dS = P (dP - delta), then the products. Every array is rounded to the dtype when it is
// written.
#include "reference/naive.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/storage.h"

namespace tessera::reference {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
float f32(double x) { return static_cast<float>(x); }

/// What the arrays between the steps hold: values of 8 bits have been widened (S14).
Dtype between(const Problem& p) { return is_scaled(p.dtype) ? Dtype::f32 : p.dtype; }

float dot(const double* a, const double* b, std::int64_t n) {
  float sum = 0.0F;
  for (std::int64_t i = 0; i < n; ++i) sum += f32(a[i]) * f32(b[i]);
  return sum;
}

void add(float factor, const double* x, std::int64_t n, double* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = static_cast<double>(f32(y[i]) + factor * f32(x[i]));
}

struct NaiveRow {
  std::vector<float> p, keep, slope;
  float p_sink = 0.0F, lse = -std::numeric_limits<float>::infinity();
};

NaiveRow naive_softmax(const Inputs& in, const Place& at) {
  const Problem& p = in.problem();
  const auto n = size(at.s.seqlen_k);
  const auto round = [&p](float x) { return round_to(between(p), x); };
  const float scale = f32(in.softmax_scale()), sink = f32(in.sink(at.h));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  NaiveRow row{std::vector<float>(n, -kInfinity), std::vector<float>(n), std::vector<float>(n)};
  float top = sink;
  for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
    if (!in.visible(at.s, at.i, j)) continue;
    const float qk = dot(in.q(at.row, at.h), in.k(at.s.first_k + j, at.hk), p.score_dim());
    float x = round(round(qk + f32(in.score_shift(at.b, at.h, at.i))) * scale);
    row.slope[size(j)] = scale;
    if (p.softcap > 0.0F) {
      const float c = std::cosh(x / p.softcap);  // 1 - tanh^2 would cancel
      row.slope[size(j)] = scale / c / c;
      x = round(p.softcap * std::tanh(x / p.softcap));
    }
    x = round(x + f32(in.bias(at.b, at.h, at.i, j) + in.alibi(at.b, at.h, at.i, j)));
    row.p[size(j)] = x;
    row.keep[size(j)] = f32(in.dropout(at.b, at.h, at.i, j));
    top = std::max(top, x);
  }
  if (std::isinf(top)) {
    row.p.assign(n, 0.0F);
    return row;
  }
  float sum = std::exp(sink - top);
  const auto exp = [](float x) { return x == -kInfinity ? 0.0F : std::exp(x); };
  for (const float x : row.p) sum += exp(x - top);
  row.lse = top + std::log(sum);
  row.p_sink = std::exp(sink - top) / sum;
  for (float& x : row.p) x = round(exp(x - top) / sum);
  return row;
}

void naive_backward_row(const Inputs& in, const Place& at, const NaiveRow& row, Outputs& out) {
  const Problem& p = in.problem();
  const auto round = [&p](float x) { return round_to(p.dtype, x); };
  const double* dout = in.dout(at.row, at.h);
  const float delta = dot(dout, in.o(at.row, at.h), p.head_dim_v) - f32(in.dlse(at.b, at.h, at.i));
  const double delta_wide = static_cast<double>(delta), one = 1.0;
  if (p.sink) add(-row.p_sink, &delta_wide, 1, &out.dsink[size(at.h)]);
  for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
    if (row.p[size(j)] == 0.0F) continue;
    const std::int64_t row_k = at.s.first_k + j, head_row_k = row_k * p.num_heads_k + at.hk;
    const float keep = row.keep[size(j)];
    const float dp = round(round(dot(dout, in.v(row_k, at.hk), p.head_dim_v)) * keep);
    const float ds = round(row.p[size(j)] * (dp - delta));
    if (p.bias) add(ds, &one, 1, &out.dbias[size(in.bias_index(at.b, at.h, at.i, j))]);
    const float dqk = round(ds * row.slope[size(j)]);
    add(dqk, in.k(row_k, at.hk), p.head_dim,
        &out.dq[size((at.row * p.num_heads + at.h) * p.head_dim)]);
    add(dqk, in.q(at.row, at.h), p.head_dim, &out.dk[size(head_row_k * p.head_dim)]);
    add(round(row.p[size(j)] * keep), dout, p.head_dim_v, &out.dv[size(head_row_k * p.head_dim_v)]);
  }
}

void round_all(Dtype dtype, std::vector<double>& values) {
  for (double& x : values) x = static_cast<double>(round_to(dtype, f32(x)));
}

}  // namespace

Outputs naive(const Inputs& in) {
  const Problem& p = in.problem();
  Outputs out = zeros(in);
  for_each_row(in, [&](const Place& at) {
    const NaiveRow row = naive_softmax(in, at);
    out.lse[size(in.lse_index(at.b, at.h, at.i))] = static_cast<double>(row.lse);
    double* o = &out.o[size((at.row * p.num_heads + at.h) * p.head_dim_v)];
    for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
      if (row.p[size(j)] == 0.0F) continue;
      const float weight = round_to(between(p), row.p[size(j)] * row.keep[size(j)]);
      add(weight, in.v(at.s.first_k + j, at.hk), p.head_dim_v, o);
    }
    if (p.pass == Pass::backward && !std::isinf(row.lse)) naive_backward_row(in, at, row, out);
  });
  round_all(p.stored_o(), out.o);
  for (auto* values : {&out.dq, &out.dk, &out.dv}) round_all(p.dtype, *values);
  if (p.bias) round_all(p.bias->dtype, out.dbias);
  return out;
}

}  // namespace tessera::reference
