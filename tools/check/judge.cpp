#include "check/judge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/value_tiles.h"
#include "reference/emulation.h"
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

std::vector<Verdict> judge_eight_bits(const core::Kernel& kernel_row,
                                      const reference::Inputs& inputs,
                                      const reference::Outputs& exact,
                                      const reference::Outputs& noise, const std::vector<double>& o,
                                      const std::vector<double>& lse) {
  const Problem& p = inputs.problem();
  const std::int64_t block_v = p.scales.v == Scaling::block ? p.scales.block_v : 0;
  // As the Hopper rows do it (cuda/tile/softmax_8bit.h): the last blocks first.
  const reference::EightBitKernel kernel = {
      .block_n = kernel_row.block_n,
      .promote_n = std::int64_t{kernel_row.block_n} * core::promoted_blocks(kernel_row, block_v),
      .offset = 6.0,
      .slack = 2.8,
      .product_sum = true,
      .last_first = true};
  const reference::Outputs emulated = reference::emulate(inputs, kernel);
  const std::vector<reference::WeightRounding> expected = reference::weight_rounding(inputs);
  const std::int64_t heads = p.num_heads, dim = p.head_dim_v, row = heads * dim;
  Verdict of_o{"o", max_difference(o, exact.o), 0.0, 0.0}, worst = of_o;
  if (!std::isnan(of_o.error)) {
    double share = -1.0;
    for (std::int64_t h = 0; h < heads; ++h) {
      double error = 0.0, rounding = 0.0, whole = 0.0, count = 0.0;
      for (std::size_t i = 0; i < exact.o.size(); ++i) {
        if (static_cast<std::int64_t>(i) % row / dim != h) continue;
        const double y = static_cast<double>(
            reference::round_to(p.stored_o(), static_cast<float>(emulated.o[i])));
        const double x = exact.o[i];
        error += (o[i] - x) * (o[i] - x);
        rounding += (y - x) * (y - x);
        whole += x * x;
        count += 1.0;
      }
      if (count == 0.0) continue;
      const reference::WeightRounding& casts = expected[static_cast<std::size_t>(h)];
      const double independent = std::max(1.0, std::min(count, casts.count));
      const double yardstick = std::sqrt(std::max(rounding, casts.energy) / count);
      const Verdict one{
          "o", std::sqrt(error / count),
          (1.1 + 4.0 / std::sqrt(independent)) * yardstick + 1e-3 * std::sqrt(whole / count),
          std::sqrt(whole / count)};
      const double ratio = one.error == 0.0 ? 0.0 : one.error / one.bound;
      if (ratio <= share) continue;
      share = ratio;
      worst = one;
    }
    of_o = worst;
  }
  std::vector<Verdict> verdicts = {of_o};
  if (lse.empty()) return verdicts;
  constexpr double kRounding = 0.07, kLost = 0x1p-15;
  Verdict of_lse{"softmax_lse", max_difference(lse, exact.lse), 0.0, 0.0};
  const double of_emulation = max_difference(emulated.lse, exact.lse);
  double share = -1.0;
  for (std::size_t i = 0; i < exact.lse.size() && !std::isnan(of_lse.error); ++i) {
    const double error = lse[i] == exact.lse[i] ? 0.0 : std::fabs(lse[i] - exact.lse[i]);
    const double bound =
        1.5 * of_emulation + noise.lse[i] + kRounding + kLost * static_cast<double>(p.seqlen_k);
    if (std::isfinite(exact.lse[i])) {
      of_lse.largest = std::max(of_lse.largest, std::fabs(exact.lse[i]));
    }
    if (error / bound <= share) continue;
    share = error / bound;
    of_lse.error = error;
    of_lse.bound = bound;
  }
  verdicts.push_back(of_lse);
  return verdicts;
}

}  // namespace tessera::tools
