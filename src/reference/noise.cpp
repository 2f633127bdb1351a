// The derivation. e is the roundoff of fp32, u that of the storage type. How roundings and sums err
// is errors.h's.
//
// Exponents. A weight exp(x) with x = score - shift errs by x's absolute error, all in units of e:
//   slope * (the dot product's)    slope = d score / d (q.k): scale, and 1 - tanh^2 with softcap
//   3 roundings of s = q.k scaled  the scale itself, its product with log2(e) (or with the query)
//   softcap: tanh, 4.2 s           2.5e-7 (cpu/math.h), its argument and its stretching: 3 more
//   bias b: b and the sum; ALiBi a: two products and the sum
//   x itself, 1.5 times            and log2(e), off by 0.22 e. Forward: the shift may lie 2^30 off
//   exp2: 3.2, or 50 where short   1.9e-7, 3.0e-6 (cpu/math.h)
//   backward: lse, twice           stored as natural fp32 and multiplied by log2(e); for all keys
//
// A shared error adds up over everything it enters. Errors of the row (lse; delta, which holds the
// rounded o) enter dq and a bias broadcast over keys through the signed sum of their factors, and
// so may any others, since equal keys err equally: rows count both as independent and as equal.
// Sums over rows (dk, dv, dbias, dsink): rows that are copies of one (stride 0) err equally too, so
// variances count as many times as there are copies. Constants and exp2's bias, the same for all,
// enter each output through the signed sum of what they multiply.
//
// Far scores may err by more than 1 where they are made of rounded values. An error x of an
// exponent grows a weight to p e^x / sum_i p_i e^(-x_i) at most, and never beyond 1: it counts in
// that proportion.
//
// Normalisation. In the forward, errors that all weights of a row share cancel: weight j moves o by
// p_j (v_j - o). The sum of weights itself has roundings of its own, all terms positive.
//
// Values of 8 bits (S14): q is multiplied by one more rounded factor, k and v are rounded when they
// are scaled, v once more when it is shifted. A shift of scores is one more term of the dot
// product. With qv a GPU rounds v and its scale to fp16, u_v, for both products. But beside qv of
// bf16 it makes scores by 8-bit tensor cores: qv is a sum of two e4m3 to 2^-17 of its greatest
// element, and accumulators cut terms off (emulation.h).
//
// Rounding of the weights to 16 bits, u p; in the backward also of ds, u ds; of the result, u |x|.
// Beside 16 bits a GPU may keep softcap's slopes as fp16, where the smallest are lost.
//
// Verdict: the smaller of the worst case and 8 standard deviations (sums of bounded independent
// errors exceed k of them with a probability below 2 exp(-k^2 / 2): 2.5e-14), plus what is shared
// by everything, plus the result's own roundings.
#include "reference/noise.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "reference/emulation.h"
#include "reference/errors.h"
#include "reference/storage.h"

namespace tessera::reference {
namespace {

constexpr double kExp2 = 1.9e-7, kExp2Short = 3.0e-6, kLog2 = 2.2e-7, kTanh = 2.5e-7;
constexpr double kSlack = 30.0 * 0.6931471805599453;  // of the forward's shift
constexpr double kLost = 0x1p-96;      // a weight this small may be 0 beside a shift 2^30 too low
constexpr std::int64_t kWhole = 1024;  // keys that are never split (S7)
constexpr std::int64_t kDecoded = 16;  // query rows of a key/value head that a GPU decodes, at most

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

class Noise {
 public:
  Noise(const Inputs& inputs, const Outputs& exact, Dtype weights)
      : in_(inputs),
        p_(inputs.problem()),
        exact_(exact),
        o_(exact.o.size()),
        dq_(exact.dq.size()),
        dk_(exact.dk.size()),
        dv_(exact.dv.size()),
        dbias_(exact.dbias.size()),
        dsink_(exact.dsink.size()),
        lse_(exact.lse.size()),
        lost_(exact.o.size()) {
    if (p_.dtype == Dtype::bf16 || p_.dtype == Dtype::f16) u_ = unit_roundoff(p_.dtype);
    if (p_.scaled()) scalings_ = 2.0;
    if (p_.qv && is_scaled(p_.stored_v())) {
      u_v_ = 2.0 * unit_roundoff(Dtype::f16);
      pairs_ = p_.dtype == Dtype::bf16;
    }
    if (is_scaled(p_.dtype)) {
      if (weights != Dtype::f32) {
        u_ = unit_roundoff(weights);
        tanh_ = 0x1p-21;
      }
    } else if (u_ > 0.0 && (p_.cache || p_.seqlen_q * p_.group() <= kDecoded)) {
      tanh_ = 0x1p-22;
    }
    if (p_.stored_o() != Dtype::f32) u_o_ = unit_roundoff(p_.stored_o());
    if (p_.dtype == Dtype::bf16) exp2_ = kExp2Short;
    for_each_row(in_, [this](const Place& at) { add_row(at, softmax_row(in_, at)); });
  }

  Outputs finished() && {
    const std::int64_t in_group =
        p_.seqlen_q * (p_.num_heads / std::max<std::int64_t>(p_.num_heads_k, 1));
    const double copies = in_.copies();
    Outputs out;
    out.lse = std::move(lse_);
    out.o = o_.bounds(exact_.o, u_o_ + 5.0 * kRoundoff, 0, 1.0);
    for (std::size_t i = 0; i < lost_.size(); ++i) out.o[i] += lost_[i];
    if (p_.pass == Pass::forward) return out;
    const double relative = u_ + 3.0 * kRoundoff;
    out.dq = dq_.bounds(exact_.dq, relative, p_.seqlen_k, 1.0);
    out.dk = dk_.bounds(exact_.dk, relative, in_group, copies);
    out.dv = dv_.bounds(exact_.dv, relative, in_group, copies);
    out.dsink = dsink_.bounds(exact_.dsink, 3.0 * kRoundoff, p_.rows_q(), copies);
    const double bias_u = p_.bias ? std::max(unit_roundoff(p_.bias->dtype), kRoundoff) : 0.0;
    out.dbias = dbias_.bounds(exact_.dbias, bias_u + 2.0 * kRoundoff, bias_terms(), copies);
    return out;
  }

 private:
  /// A weight's exponent.
  struct Exponent {
    Error own;            ///< of this key
    double common = 0.0;  ///< constants and lse, if all rows' are as large and of one sign
  };

  /// Terms of an element of dbias.
  std::int64_t bias_terms() const {
    const std::int64_t all = p_.batch * p_.num_heads * p_.seqlen_q * p_.seqlen_k;
    return all / std::max<std::int64_t>(in_.bias_size(), 1);
  }

  /// Score parts of key j, before the mask.
  struct Parts {
    Dot qk;
    double s = 0.0, bias = 0.0, alibi = 0.0;
    double size() const { return std::fabs(s) + std::fabs(bias) + std::fabs(alibi); }
  };
  Parts parts(const Place& at, std::int64_t j) const {
    Parts x{dot(in_.q(at.row, at.h), in_.k(at.s.first_k + j, at.hk), p_.score_dim(),
                in_.score_shift(at.b, at.h, at.i), scalings_),
            0.0, in_.bias(at.b, at.h, at.i, j), in_.alibi(at.b, at.h, at.i, j)};
    if (u_v_ > 0.0) add_rounded_values(at, j, x.qk.error);
    x.s = in_.softmax_scale() * x.qk.value;
    const auto cap = static_cast<double>(p_.softcap);
    if (cap > 0.0) x.s = cap * std::tanh(x.s / cap);
    return x;
  }

  /// What the terms of qv . v err by as they are multiplied.
  void add_rounded_values(const Place& at, std::int64_t j, Error& error) const {
    const double* q = in_.q(at.row, at.h);
    const double* k = in_.k(at.s.first_k + j, at.hk);
    if (!pairs_) {
      for (std::int64_t c = p_.head_dim; c < p_.score_dim(); ++c) error.add(u_v_ * q[c] * k[c]);
      return;
    }
    double most = 0.0;
    for (std::int64_t c = p_.head_dim; c < p_.score_dim(); ++c) {
      most = std::max(most, std::fabs(q[c]));
    }
    constexpr std::int64_t kGroup = 128;  // columns that accumulators have sums of
    for (std::int64_t c = p_.head_dim; c < p_.score_dim(); c += kGroup) {
      const std::int64_t n = std::min(kGroup, p_.score_dim() - c);
      for (std::int64_t i = 0; i < n; ++i) error.add(0x1p-17 * most * k[c + i]);
      constexpr int kParts = 2;
      const double scale = std::fabs(in_.v_scale(at.b, at.hk, j, c - p_.head_dim));
      const CutTerms cut = cut_terms({q + c, size(n)}, {k + c, size(n)}, scale, kParts);
      error.variance += cut.variance;
      error.worst += cut.worst;
    }
  }

  /// `shifted`: size of score - shift.
  Exponent exponent(const Parts& x, double slope, double shifted, double lse) const {
    Exponent e;
    e.own.add(x.qk.error, slope);
    e.own.round(x.s, 3);
    if (p_.softcap > 0.0F) {
      e.own.round(x.s, 3);
      e.own.add(kTanh * x.s);
      e.own.add(tanh_ * static_cast<double>(p_.softcap));
    }
    if (p_.bias) {
      e.own.round(x.bias);
      e.own.round(x.size());
    }
    if (p_.alibi != PerHead::none) {
      e.own.round(x.alibi, 2);
      e.own.round(x.size());
    }
    e.own.add(1.5 * kRoundoff * shifted);
    e.own.add(exp2_);
    e.own.round(lse, 2);
    e.common = exp2_ + kRoundoff * (2.0 * std::fabs(lse) + 2.0 * std::fabs(x.s) + shifted);
    return e;
  }

  void add_row(const Place& at, const Row& row) {
    if (std::isinf(row.lse)) return;
    const std::int64_t n = at.s.seqlen_k;
    std::vector<Parts> keys;
    double largest = p_.sink ? std::fabs(in_.sink(at.h)) : 0.0;
    for (std::int64_t j = 0; j < n; ++j) {
      keys.push_back(row.p[size(j)] > 0.0 ? parts(at, j) : Parts{});
      if (row.p[size(j)] > 0.0) largest = std::max(largest, keys.back().size());
    }
    if (p_.pass == Pass::backward) {
      add_backward_row(at, row, keys);
    } else {
      add_forward_row(at, row, keys, largest);
    }
  }

  /// Errors of weights that are not small, in proportion to what they may grow to.
  static void grow(const Row& row, std::vector<Exponent>& exponents) {
    const auto bound = [](const Exponent& e) {
      return std::min(e.own.worst, kSigmas * std::sqrt(e.own.variance));
    };
    double least = row.p_sink;
    for (std::size_t j = 0; j < exponents.size(); ++j) {
      least += row.p[j] * std::exp(-bound(exponents[j]));
    }
    for (std::size_t j = 0; j < exponents.size(); ++j) {
      const double x = bound(exponents[j]), moves = row.p[j] * x;
      if (moves == 0.0) continue;
      const double factor = std::max(1.0, std::min(std::exp(x) / least, 1.0 / moves));
      exponents[j].own.variance *= square(factor);
      exponents[j].own.worst *= factor;
    }
  }

  void add_forward_row(const Place& at, const Row& row, const std::vector<Parts>& keys,
                       double largest) {
    const std::int64_t n = at.s.seqlen_k, columns = p_.head_dim_v;
    // Of the longest sequence, of a cache's capacity; and where a prefix ends, keys are split
    // again.
    const int splits =
        (p_.seqlen_k > kWhole ? 1 : 0) + (p_.cache && p_.cache->prefix_levels > 0 ? 1 : 0);
    const auto first = size((at.row * p_.num_heads + at.h) * columns);
    const double slack = std::min(2.0 * largest, kSlack);
    std::vector<double> together(size(columns));  // if all exponents err alike
    double sum = 0.0, path = 0.0, squares = 0.0, count = 0.0, exponents = 0.0;
    Error lse;
    Alike terms, weights;
    const double unit = 1.0;
    const auto enter = [&](double p, const Exponent& e) {
      sum += p;
      // In blocks of 256 keys at most: 8 deviations of this exceed half a block's 256 roundings.
      path += std::min(weights.next(&unit, 1, p), 31.0) * sum * sum;
      squares += p * p;
      count += 1.0;
      exponents += p * std::sqrt(e.own.variance);
      lse.add(e.own, p);
    };
    std::vector<Exponent> errors(size(n));
    for (std::size_t j = 0; j < errors.size(); ++j) {
      if (row.p[j] == 0.0) continue;
      errors[j] = exponent(keys[j], row.slope[j], slack - std::log(row.p[j]), 0.0);
      if (splits > 0) errors[j].own.round(row.lse, 4 * splits);  // lse of a part and its way back
    }
    grow(row, errors);
    for (std::int64_t j = 0; j < n; ++j) {
      const double p = row.p[size(j)], weight = p * row.keep[size(j)];
      if (p == 0.0) continue;
      const Exponent& e = errors[size(j)];
      enter(p, e);
      const double* v = in_.v(at.s.first_k + j, at.hk);
      Error rounding;
      rounding.add(u_ * weight);
      rounding.add(scalings_ * kRoundoff * weight);
      rounding.add(u_v_ * weight);
      o_.add(first, v, columns, weight, rounding, u_ * weight, n, terms.next(v, columns, weight));
      const double one = std::sqrt(e.own.variance);
      for (std::int64_t c = 0; c < columns; ++c) {
        const double moves = weight * v[c] - p * exact_.o[first + size(c)];
        o_.variance[first + size(c)] += square(moves) * e.own.variance;
        o_.worst[first + size(c)] += std::fabs(moves) * e.own.worst;
        together[size(c)] += moves * one;
        lost_[first + size(c)] += kLost * std::fabs(row.keep[size(j)] * v[c]);
      }
      add_shift(at, first, weight);
    }
    if (row.p_sink > 0.0) {
      Exponent e = exponent({}, 0.0, slack - std::log(row.p_sink), 0.0);
      e.own.round(in_.sink(at.h));
      enter(row.p_sink, e);
      for (std::int64_t c = 0; c < columns; ++c) {
        const double moves = row.p_sink * exact_.o[first + size(c)];
        o_.variance[first + size(c)] += square(moves) * e.own.variance;
        o_.worst[first + size(c)] += std::fabs(moves) * e.own.worst;
        together[size(c)] -= moves * std::sqrt(e.own.variance);
      }
    }
    const Error sums = {square(kRoundoff) / 3.0 * (path + count * (1.0 + squares) / 3.0),
                        kRoundoff * count};
    o_.add_error(first, &exact_.o[first], columns, sums);
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::size_t i = first + size(c);
      o_.variance[i] += square(together[size(c)]) + o_.order(i, n);
    }
    lse.add(sums);
    lse.round(row.lse, 2 + 4 * splits);
    lse.add(kLog2 * (slack + std::log(count)));
    lse.worst += exp2_;
    lse_[size(in_.lse_index(at.b, at.h, at.i))] =
        std::min(lse.worst, kSigmas * std::sqrt(lse.variance + square(exponents)) + exp2_) +
        kRoundoff * largest;
  }

  /// A value that was shifted has an error of the shift's size.
  void add_shift(const Place& at, std::size_t first, double weight) {
    if (!p_.scales.v_shift) return;
    for (std::int64_t c = 0; c < p_.head_dim_v; ++c) {
      Error e;
      e.round(weight * in_.v_shift(at.b, at.hk, c), 2);
      o_.variance[first + size(c)] += e.variance;
      o_.worst[first + size(c)] += e.worst;
    }
  }

  /// Of o as it was stored.
  double o_roundoff(double o) const {
    return std::max(std::max(u_o_, kRoundoff) * std::fabs(o), subnormal_roundoff(p_.stored_o()));
  }

  /// Relative error of 1 - tanh^2, made from exp2(2 |x|), and how it enters ds.
  Error slope_error(const Parts& x) const {
    Error e;
    if (!(p_.softcap > 0.0F)) return e;
    const double to_argument = in_.softmax_scale() / static_cast<double>(p_.softcap);
    e.add(x.qk.error, 2.0 * to_argument);
    e.round(2.0 * to_argument * x.qk.value, 4);
    e.add(2.0 * kExp2);
    e.round(1.0, 6);
    return e;
  }

  /// What a slope may lose as fp16, however small it is.
  double lost_slope() const {
    return p_.softcap > 0.0F && u_ > 0.0 ? subnormal_roundoff(Dtype::f16) : 0.0;
  }

  /// dP of a row, and delta with what all its keys share.
  struct Gradients {
    std::vector<Dot> dp;
    double delta = 0.0;
    Error delta_error;
  };

  Gradients gradients(const Place& at, const Row& row) const {
    const double *dout = in_.dout(at.row, at.h), *o = in_.o(at.row, at.h);
    const Dot from_o = dot(dout, o, p_.head_dim_v);
    Gradients g{{}, from_o.value - in_.dlse(at.b, at.h, at.i), from_o.error};
    for (std::int64_t c = 0; c < p_.head_dim_v; ++c) g.delta_error.add(o_roundoff(o[c]) * dout[c]);
    g.delta_error.round(g.delta);
    const bool dropout = p_.dropout_p > 0.0F;
    if (dropout) g.delta_error.round(g.delta);  // 1 / (1 - p), relative to that of dp
    for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
      const double p = row.p[size(j)], keep = row.keep[size(j)];
      Dot x;
      if (p > 0.0) x = dot(dout, in_.v(at.s.first_k + j, at.hk), p_.head_dim_v);
      Error error;
      error.add(x.error, keep);
      if (dropout) error.round(keep * x.value, 2);
      g.dp.push_back({keep * x.value, error});
      g.delta_error.add(error, std::sqrt(p));  // equal values err equally
    }
    return g;
  }

  /// One row's part of dbias: dbias += ds.
  struct BiasRow {
    struct Element {
      double together = 0.0;  ///< if all exponents err alike
      double from_delta = 0.0;
      int terms = 0;
    };
    Sums& sums;
    const Error& delta_error;
    std::int64_t terms;
    std::map<std::size_t, Element> elements;

    void add(std::size_t index, double p, double ds, const Error& own, const Exponent& e) {
      const double one = 1.0;
      sums.add(index, &one, 1, ds, own, e.common * ds, terms);
      Element& element = elements[index];
      element.together += ds * std::sqrt(e.own.variance);
      element.from_delta += p;
      ++element.terms;
    }
    void finish() const {
      for (const auto& [index, element] : elements) {
        if (element.terms > 1) sums.add_error(index, &element.together, 1, {1.0, 0.0});
        sums.add_error(index, &element.from_delta, 1, delta_error);
      }
    }
  };

  void add_backward_row(const Place& at, const Row& row, const std::vector<Parts>& keys) {
    const std::int64_t n = at.s.seqlen_k, d = p_.head_dim, dv = p_.head_dim_v;
    const std::int64_t in_group = at.s.seqlen_q * (p_.num_heads / p_.num_heads_k);
    const double *q = in_.q(at.row, at.h), *dout = in_.dout(at.row, at.h);
    const auto [dp, delta, delta_error] = gradients(at, row);
    if (row.p_sink > 0.0) add_sink(at, row, delta, delta_error);

    const double lost = lost_slope();
    std::vector<double> together(size(d)), from_delta(size(d));
    BiasRow bias{dbias_, delta_error, bias_terms(), {}};
    Alike terms;
    for (std::int64_t j = 0; j < n; ++j) {
      const double p = row.p[size(j)], keep = row.keep[size(j)];
      if (p == 0.0) continue;
      const std::int64_t row_k = at.s.first_k + j, head_row_k = row_k * p_.num_heads_k + at.hk;
      const Parts& x = keys[size(j)];
      Exponent e = exponent(x, row.slope[size(j)], -std::log(p), row.lse);
      e.own.add(u_);  // P is rounded
      e.common += u_;
      // dv += p keep dout
      Error weight;
      weight.add(e.own, p * keep);
      if (p_.dropout_p > 0.0F) weight.round(p * keep, 2);
      dv_.add(size(head_row_k * dv), dout, dv, p * keep, weight, e.common * p * keep, in_group);
      // ds = p (dp - delta)
      const double ds = p * (dp[size(j)].value - delta);
      Error own;
      own.add(e.own, ds);
      own.add(dp[size(j)].error, p);
      own.round(ds, 2);
      if (p_.bias) bias.add(size(in_.bias_index(at.b, at.h, at.i, j)), p, ds, own, e);
      // ds c, rounded; dq += ds c k, dk += ds c q
      const double slope = row.slope[size(j)], dqk = ds * slope;
      Error product;
      product.add(own, slope + lost);
      product.add(slope_error(x), dqk);
      product.add(lost * ds);
      product.round(dqk, 2);
      product.add(u_ * dqk);
      const double common = (e.common + u_) * dqk, alike = dqk * std::sqrt(e.own.variance);
      const double* k = in_.k(row_k, at.hk);
      const auto head_row = size((at.row * p_.num_heads + at.h) * d);
      dq_.add(head_row, k, d, dqk, product, common, n, terms.next(k, d, dqk));
      for (std::int64_t c = 0; c < d; ++c) {
        together[size(c)] += alike * k[c];
        from_delta[size(c)] += p * (slope + lost) * k[c];
      }
      product.add(delta_error, p * (slope + lost));
      dk_.add(size(head_row_k * d), q, d, dqk, product, common, in_group);
    }
    const auto head_row = size((at.row * p_.num_heads + at.h) * d);
    dq_.add_error(head_row, together.data(), d, {1.0, 0.0});
    dq_.add_error(head_row, from_delta.data(), d, delta_error);
    bias.finish();
  }

  /// dsink -= p_sink delta
  void add_sink(const Place& at, const Row& row, double delta, const Error& delta_error) {
    const double one = 1.0;
    Exponent e = exponent({}, 0.0, -std::log(row.p_sink), row.lse);
    e.own.round(in_.sink(at.h));
    Error all;
    all.add(e.own, row.p_sink * delta);
    all.add(delta_error, row.p_sink);
    all.round(row.p_sink * delta);
    dsink_.add(size(at.h), &one, 1, -row.p_sink * delta, all, -e.common * row.p_sink * delta,
               p_.rows_q());
  }

  const Inputs& in_;
  const Problem& p_;
  const Outputs& exact_;
  Sums o_, dq_, dk_, dv_, dbias_, dsink_;
  std::vector<double> lse_, lost_;
  double u_ = 0.0;         ///< 0 for fp32: nothing is stored on the way
  double u_o_ = 0.0;       ///< of o; 0 for fp32
  double u_v_ = 0.0;       ///< of v of 8 bits as it is multiplied; 0: widened exactly
  bool pairs_ = false;     ///< whether v of 8 bits is multiplied by 8-bit tensor cores
  double scalings_ = 0.0;  ///< of values of 8 bits: roundings of each before it is multiplied
  double exp2_ = kExp2;
  /// 1 - 2 / (1 + e^2x), where a GPU caps products of 8 bits, or decodes: errs by so much.
  double tanh_ = 0.0;
};

}  // namespace

Outputs noise(const Inputs& in, const Outputs& exact, Dtype weights) {
  return Noise(in, exact, weights).finished();
}

}  // namespace tessera::reference
