#include "check/judge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/storage.h"

namespace tessera::tools {

double max_difference(const std::vector<double>& a, const std::vector<double>& b) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (a.size() != b.size()) return kNan;
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double difference = std::fabs(a[i] - b[i]);
    if (!std::isfinite(difference)) return kNan;
    largest = std::max(largest, difference);
  }
  return largest;
}

Verdict judge(const Standard& standard, const std::vector<double>& result) {
  const std::vector<double>&exact = *standard.exact, &noise = *standard.noise;
  Verdict verdict{standard.output, max_difference(result, exact), 0.0, 0.0};
  for (const double x : exact) {
    if (std::isfinite(x)) verdict.largest = std::max(verdict.largest, std::fabs(x));
  }
  if (std::isnan(verdict.error) || noise.size() != exact.size()) return verdict;
  double allowed = 0.0, atol = 0.0;
  if (standard.output != "softmax_lse") {
    constexpr double kUnderflow = 1e-30;
    const double factor = standard.output == "o" ? 2.0 : 3.0;
    const double naive = max_difference(*standard.naive, exact);
    if (std::isfinite(naive)) allowed = factor * naive;  // one that overflows says nothing
    atol = std::max(3.0 * reference::subnormal_roundoff(standard.dtype), kUnderflow);
  }
  double worst = -1.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double error = result[i] == exact[i] ? 0.0 : std::fabs(result[i] - exact[i]);
    const double bound = std::max(allowed, noise[i]) + atol;  // of a noise that is NaN: allowed
    const double share = error == 0.0 ? 0.0 : error / bound;
    if (share <= worst) continue;
    worst = share;
    verdict.error = error;
    verdict.bound = bound;
  }
  return verdict;
}

}  // namespace tessera::tools
