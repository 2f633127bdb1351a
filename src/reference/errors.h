// How errors of rounding add up: what the error analysis of attention (noise.cpp) is made of. One
// rounding of a number x is a random number in [-e |x|, e |x|] of variance (e x)^2 / 3, where
// e = 2^-24 is the roundoff of fp32, independent of all others.
//
// Sums. n terms t in some order with partial sums S_i: each S_i is rounded, and in some kernels
// each product, so the variance is (Q + T^2) e^2 / 3, Q = sum S_i^2, T^2 = sum t^2. Kernels sum in
// orders of their own (lane by lane, in blocks of 64 to 256 keys): to what the order of memory
// gives we add n (S^2 + T^2) / 3, twice the mean of Q over all orders. Worst case: n e sum |t|. So
// for scores of one sign the relative error grows as sqrt(n / 3) e, for others faster. Equal terms
// err to the same side while the sum stays between two powers of two: r of them count r^2 times.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace tessera::reference {

inline constexpr double kRoundoff = 0x1p-24;
inline constexpr double kSigmas = 8.0;  ///< of a verdict (noise.cpp)

inline double square(double x) { return x * x; }

/// The sum of independent errors: its variance, and its size in the worst case.
struct Error {
  double variance = 0.0, worst = 0.0;

  /// An error of at most `bound`, any size up to it as likely as any other.
  void add(double bound) {
    variance += square(bound) / 3.0;
    worst += std::fabs(bound);
  }
  void add(const Error& e, double factor = 1.0) {
    variance += square(factor) * e.variance;
    worst += std::fabs(factor) * e.worst;
  }
  /// As many roundings of x.
  void round(double x, int times = 1) {
    for (int i = 0; i < times; ++i) add(kRoundoff * x);
  }
};

struct Dot {
  double value = 0.0;
  Error error;
};

/// `more`: a term that comes last; `roundings`: of each term's factors before they are multiplied.
inline Dot dot(const double* a, const double* b, std::int64_t n, double more = 0.0,
               double roundings = 0.0) {
  double sum = 0.0, path = 0.0, squares = 0.0, sizes = 0.0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double t = a[i] * b[i];
    sum += t;
    path += sum * sum;
    squares += t * t;
    sizes += std::fabs(t);
  }
  if (more != 0.0) {
    sum += more;
    path += sum * sum;
    squares += more * more;
    sizes += std::fabs(more);
  }
  const auto count = static_cast<double>(n);
  const double all = path + (2.0 + roundings) * squares + count * (sum * sum + squares) / 3.0;
  return {sum, {square(kRoundoff) / 3.0 * all, kRoundoff * (count + 2.0 + roundings) * sizes}};
}

/// Elements that are sums: what is known of each so far.
struct Sums {
  std::vector<double> value, variance, worst, shared;

  explicit Sums(std::size_t n) : value(n), variance(n), worst(n), shared(n) {}

  /// Adds factor * x[i] to element first + i, one of `terms` terms. The factor errs by `error`
  /// independently, and by a constant of size `common`. `alike`: from Alike.
  void add(std::size_t first, const double* x, std::int64_t n, double factor, const Error& error,
           double common, std::int64_t terms, double alike = 1.0) {
    const auto count = static_cast<double>(terms);
    const double own = error.variance + square(kRoundoff * factor) / 3.0 * (1.0 + count / 3.0);
    const double most = error.worst + kRoundoff * (count + 1.0) * std::fabs(factor);
    double *v = &value[first], *e = &variance[first], *w = &worst[first], *s = &shared[first];
    for (std::int64_t i = 0; i < n; ++i) {
      v[i] += factor * x[i];
      e[i] += own * x[i] * x[i] + alike * square(kRoundoff) / 3.0 * v[i] * v[i];
      w[i] += most * std::fabs(x[i]);
      s[i] += common * x[i];
    }
  }

  /// One more error, factor[i] times an error.
  void add_error(std::size_t first, const double* factor, std::int64_t n, const Error& error) {
    for (std::int64_t i = 0; i < n; ++i) {
      variance[first + static_cast<std::size_t>(i)] += square(factor[i]) * error.variance;
      worst[first + static_cast<std::size_t>(i)] += std::fabs(factor[i]) * error.worst;
    }
  }

  /// What the order of an element's terms adds to its variance.
  double order(std::size_t i, std::int64_t terms) const {
    return static_cast<double>(terms) / 9.0 * square(kRoundoff * value[i]);
  }
  /// What is written is `exact`, rounded by `relative`, a sum of `terms` terms (0: their order is
  /// in the variance already); `copies`: of rows.
  std::vector<double> bounds(const std::vector<double>& exact, double relative, std::int64_t terms,
                             double copies) const {
    std::vector<double> out(value.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double likely = kSigmas * std::sqrt(copies * (variance[i] + order(i, terms)));
      out[i] = std::min(worst[i], likely + std::fabs(shared[i])) + relative * std::fabs(exact[i]);
    }
    return out;
  }
};

/// Finds terms factor * x that equal earlier ones, to about fp32.
class Alike {
 public:
  /// How often the term's rounding counts, so that those of r equal terms count r^2 times.
  double next(const double* x, std::int64_t n, double factor) {
    if (factor == 0.0) return 1.0;
    int exponent = 0;
    const double mantissa = std::round(std::frexp(factor, &exponent) * 0x1p20);
    Group& group = groups_[std::ldexp(mantissa, exponent)];
    if (group.x == nullptr) group.x = x;
    if (group.x != x && !std::equal(x, x + n, group.x)) return 1.0;
    return 2.0 * ++group.count - 1.0;
  }

 private:
  struct Group {
    const double* x = nullptr;
    double count = 0.0;
  };
  std::unordered_map<double, Group> groups_;
};

}  // namespace tessera::reference
