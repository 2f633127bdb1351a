#include "reference/emulation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "reference/storage.h"

namespace tessera::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLog2e = 1.4426950408889634;
constexpr int kFractionBits = 13;
constexpr int kStep = 32;           ///< products of one wgmma
constexpr int kLeastExponent = -6;  ///< of e4m3: subnormal elements have it, too

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
double f32(double x) { return static_cast<double>(static_cast<float>(x)); }

/// Of an element of e4m3.
int exponent_of(double x) { return std::max(std::ilogb(x), kLeastExponent); }

double cut(double x, int exponent) {
  const double unit = std::ldexp(1.0, exponent - kFractionBits);
  return std::trunc(x / unit) * unit;
}

/// What one row has gathered.
struct RowState {
  double reference = -kInfinity;  ///< log2
  double sum = 0.0;
  double part_sum = 0.0;     ///< where it is a product: the accumulator
  std::vector<double> part;  ///< [head_dim_v] the accumulator
  std::vector<double> o;     ///< [head_dim_v] promoted, in values
};

class Emulator {
 public:
  Emulator(const Inputs& inputs, const EightBitKernel& kernel) : in_(inputs), kernel_(kernel) {}

  Outputs run() {
    Outputs out = zeros(in_);
    for_each_row(in_, [&](const Place& at) { add_row(at, out); });
    return out;
  }

 private:
  /// log2 of the weights before the reference is taken off; -inf where masked.
  std::vector<double> scores(const Place& at) const {
    const Problem& p = in_.problem();
    const std::int64_t d = p.head_dim;
    const double* q = in_.q_elements(at.row, at.h);
    const double q_scale = in_.q_scale(at.b, at.h, at.i);
    std::vector<double> x(size(at.s.seqlen_k), -kInfinity);
    for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
      if (!in_.visible(at.s, at.i, j)) continue;
      const double* k = in_.k_elements(at.s.first_k + j, at.hk);
      double qk = 0.0;
      for (std::int64_t c = 0; c < d; c += kStep) {
        const auto n = size(std::min<std::int64_t>(kStep, d - c));
        qk = accumulate(qk, {q + c, n}, {k + c, n});
      }
      double s = in_.softmax_scale() *
                 (qk * q_scale * in_.k_scale(at.b, at.hk, j) + in_.score_shift(at.b, at.h, at.i));
      const auto cap = static_cast<double>(p.softcap);
      if (cap > 0.0) s = cap * std::tanh(s / cap);
      s += in_.alibi(at.b, at.h, at.i, j) + in_.bias(at.b, at.h, at.i, j);
      x[size(j)] = f32(s * kLog2e);
    }
    return x;
  }

  /// Takes over what the accumulator holds of keys up to `key`, which begins again.
  void promote(const Place& at, std::int64_t key, RowState& row) const {
    for (std::size_t c = 0; c < row.part.size(); ++c) {
      const double scale = in_.v_scale(at.b, at.hk, key, static_cast<std::int64_t>(c));
      row.o[c] = f32(row.o[c] + f32(row.part[c] * scale));
      row.part[c] = 0.0;
    }
    row.sum = f32(row.sum + row.part_sum);
    row.part_sum = 0.0;
  }

  static void raise(double reference, RowState& row) {
    const double factor = f32(std::exp2(row.reference - reference));
    row.sum = f32(row.sum * factor);
    row.part_sum = f32(row.part_sum * factor);
    for (double& x : row.part) x = f32(x * factor);
    for (double& x : row.o) x = f32(x * factor);
    row.reference = reference;
  }

  /// A block of keys: its maximum, its weights, their products with v.
  void add_block(const Place& at, const std::vector<double>& x, std::int64_t begin,
                 std::int64_t end, RowState& row) const {
    const double top = *std::max_element(x.begin() + begin, x.begin() + end);
    if (top == -kInfinity) return;
    if (top > row.reference + kernel_.slack) raise(top, row);
    std::array<double, kStep> weights{}, column{}, ones{};
    ones.fill(1.0);
    for (std::int64_t j = begin; j < end; j += kStep) {
      const std::int64_t n = std::min<std::int64_t>(kStep, end - j);
      for (std::int64_t i = 0; i < n; ++i) {
        const double weight = f32(std::exp2(x[size(j + i)] - row.reference + kernel_.offset));
        weights[size(i)] = static_cast<double>(round_to(Dtype::e4m3, static_cast<float>(weight)));
        if (!kernel_.product_sum) row.sum = f32(row.sum + weights[size(i)]);
      }
      if (kernel_.product_sum) {
        row.part_sum = accumulate(row.part_sum, {weights.data(), size(n)}, {ones.data(), size(n)});
      }
      for (std::size_t c = 0; c < row.part.size(); ++c) {
        for (std::int64_t i = 0; i < n; ++i) {
          column[size(i)] = in_.v_elements(at.s.first_k + j + i, at.hk)[c];
        }
        row.part[c] = accumulate(row.part[c], {weights.data(), size(n)}, {column.data(), size(n)});
      }
    }
  }

  void add_row(const Place& at, Outputs& out) const {
    const Problem& p = in_.problem();
    const std::int64_t n = at.s.seqlen_k;
    const std::vector<double> x = scores(at);
    RowState row;
    row.part.resize(size(p.head_dim_v));
    row.o.resize(size(p.head_dim_v));
    std::int64_t pending = 0, last = 0;
    const std::int64_t blocks = (n + kernel_.block_n - 1) / kernel_.block_n;
    for (std::int64_t i = 0; i < blocks; ++i) {
      const std::int64_t block = kernel_.last_first ? blocks - 1 - i : i;
      const std::int64_t begin = block * kernel_.block_n,
                         end = std::min(begin + kernel_.block_n, n);
      add_block(at, x, begin, end, row);
      last = begin;
      pending += end - begin;
      const bool full = kernel_.promote_n > 0 && pending >= kernel_.promote_n;
      if (full) {
        promote(at, last, row);
        pending = 0;
      }
    }
    if (n > 0) promote(at, last, row);
    finish(at, row, out);
  }

  void finish(const Place& at, const RowState& row, Outputs& out) const {
    const Problem& p = in_.problem();
    const double sink = in_.sink(at.h);
    double& lse = out.lse[size(in_.lse_index(at.b, at.h, at.i))];
    const double of_keys =
        row.sum > 0.0 ? (row.reference - kernel_.offset) / kLog2e + std::log(row.sum) : -kInfinity;
    const double top = std::max(sink, of_keys);
    lse = top == -kInfinity ? top : top + std::log(std::exp(sink - top) + std::exp(of_keys - top));
    if (row.sum == 0.0) return;
    const double share = std::exp(of_keys - lse);  // what the sink leaves of the weights
    double* o = &out.o[size((at.row * p.num_heads + at.h) * p.head_dim_v)];
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      o[c] = f32((row.o[size(c)] / row.sum + in_.v_shift(at.b, at.hk, c)) * share);
    }
  }

  const Inputs& in_;
  const EightBitKernel kernel_;
};

}  // namespace

double accumulate(double accumulator, std::span<const double> a, std::span<const double> b) {
  int top = accumulator == 0.0 ? std::numeric_limits<int>::min() : std::ilogb(accumulator);
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != 0.0 && b[i] != 0.0) top = std::max(top, exponent_of(a[i]) + exponent_of(b[i]));
  }
  if (top == std::numeric_limits<int>::min()) return 0.0;
  double sum = cut(accumulator, top);
  for (std::size_t i = 0; i < a.size(); ++i) sum += cut(a[i] * b[i], top);
  return sum == 0.0 ? 0.0 : cut(sum, std::ilogb(sum));
}

Outputs emulate(const Inputs& inputs, const EightBitKernel& kernel) {
  return Emulator(inputs, kernel).run();
}

// Of each of 32 terms a unit is cut off at most, half of one in the mean, towards zero; so terms of
// one sign add up. A unit is that of the greatest of the terms and sums, or of the exponent above,
// which parts of `a` may have; a subnormal b has the exponent of the least normal one.
CutTerms cut_terms(std::span<const double> a, std::span<const double> b, double scale, int parts) {
  const double least = std::ldexp(scale, kLeastExponent);
  CutTerms cut;
  double sum = 0.0;
  for (std::size_t begin = 0; begin < a.size(); begin += kStep) {
    const std::size_t end = std::min(begin + kStep, a.size());
    double greatest = std::fabs(sum), signs = 0.0;
    for (std::size_t i = begin; i < end; ++i) {
      const double term = a[i] * b[i];
      greatest = std::max({greatest, std::fabs(term), std::fabs(a[i]) * least});
      signs += term > 0.0 ? 1.0 : term < 0.0 ? -1.0 : 0.0;
      sum += term;
    }
    greatest = std::max(greatest, std::fabs(sum));
    if (greatest == 0.0 || !std::isfinite(greatest)) continue;
    const double unit = std::ldexp(1.0, std::ilogb(greatest) + 1 - kFractionBits);
    const double alike = parts * unit * (std::fabs(signs) / 2.0 + 1.0);
    const double terms = parts * static_cast<double>(end - begin);
    cut.variance += (alike * alike + terms * unit * unit / 4.0) / 3.0;
    cut.worst += alike + terms * unit;
  }
  return cut;
}

std::vector<WeightRounding> weight_rounding(const Inputs& inputs) {
  // The mean square of a rounding of numbers whose logarithms are as likely as any other's.
  constexpr double kSquare = 0x1p-8 / 3.0 * 0.375 * kLog2e;
  constexpr double kAlike = 64.0;  // parts of an octave
  const Problem& p = inputs.problem();
  std::vector<WeightRounding> heads(size(p.num_heads));
  std::vector<double> squares(heads.size()), mean(size(p.head_dim_v));
  for_each_row(inputs, [&](const Place& at) {
    const Row row = softmax_row(inputs, at);
    const double of_keys = 1.0 - row.p_sink;  // roundings of the sum of weights are in o, too
    std::fill(mean.begin(), mean.end(), 0.0);
    for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
      const double weight = row.p[size(j)];
      if (weight == 0.0) continue;
      const double* v = inputs.v(at.s.first_k + j, at.hk);
      for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += weight / of_keys * v[c];
    }
    std::map<double, std::vector<double>> moved;  // what weights that are alike move, by their size
    for (std::int64_t j = 0; j < at.s.seqlen_k; ++j) {
      const double weight = row.p[size(j)];
      if (weight == 0.0) continue;
      const double* v = inputs.v(at.s.first_k + j, at.hk);
      std::vector<double>& sum = moved[std::floor(kAlike * std::log2(weight))];
      sum.resize(mean.size());
      for (std::size_t c = 0; c < mean.size(); ++c) sum[c] += weight * (v[c] - mean[c]);
    }
    for (const auto& [logarithm, sum] : moved) {
      double energy = 0.0;
      for (const double x : sum) energy += kSquare * x * x;
      heads[size(at.h)].energy += energy;
      squares[size(at.h)] += energy * energy;
    }
  });
  for (std::size_t h = 0; h < heads.size(); ++h) {
    if (squares[h] > 0.0) heads[h].count = heads[h].energy * heads[h].energy / squares[h];
    heads[h].count /= inputs.copies();
  }
  return heads;
}

}  // namespace tessera::reference
