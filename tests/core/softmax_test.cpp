// S4, S5, S7: the softmax state merges like a monoid, in any grouping, with empty parts, and gives
// the textbook softmax and logarithm of the sum.
#include "core/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/score.h"

namespace tessera::core {
namespace {

using Row = Softmax<float>;

Row row_of(const std::vector<float>& scores2) {
  Row row;
  for (const float s : scores2) row = combine(row, Row{s, 1.0F});
  return row;
}

double exact_lse(const std::vector<float>& scores2) {
  double sum = 0.0;
  for (const float s : scores2) sum += std::exp2(static_cast<double>(s));
  return std::log(sum);
}

TEST(Softmax, EmptyIsTheIdentity_S4) {
  const Row empty;
  const Row some{3.0F, 2.0F};
  for (const Row& merged : {combine(empty, some), combine(some, empty)}) {
    EXPECT_EQ(merged.max, some.max);
    EXPECT_EQ(merged.sum, some.sum);
  }
  const Row both = combine(empty, empty);
  EXPECT_EQ(both.sum, 0.0F);
  EXPECT_EQ(lse_of(both), -kInfinity);
  EXPECT_EQ(inverse_sum(both), 0.0F);
  EXPECT_EQ(weight_of(empty, both), 0.0F);
  EXPECT_EQ(backward_shift(lse_of(both)), kInfinity);
}

TEST(Softmax, ASinglePartWeighsOne_S7) {
  std::mt19937 random(std::random_device{}());
  for (int trial = 0; trial < 1000; ++trial) {
    const float lse = std::normal_distribution<float>(0.0F, 50.0F)(random);
    const Row merged = combine(combine(Row(), from_lse(lse)), from_lse(-kInfinity));
    EXPECT_EQ(weight_of(from_lse(lse), merged), 1.0F) << lse;
  }
}

TEST(Softmax, AnySplitGivesTheSameLse_S5_S7) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 30.0F);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> scores(1 + random() % 40);
    for (float& s : scores) s = random() % 10 == 0 ? -kInfinity : normal(random);
    scores[0] = normal(random);
    const std::size_t cut = random() % (scores.size() + 1);
    const auto middle = scores.begin() + static_cast<std::ptrdiff_t>(cut);
    const Row left = row_of({scores.begin(), middle});
    const Row right = row_of({middle, scores.end()});
    const double expected = exact_lse(scores);
    EXPECT_NEAR(lse_of(row_of(scores)), expected, 1e-5 * (1.0 + std::abs(expected)));
    EXPECT_NEAR(lse_of(combine(left, right)), expected, 1e-5 * (1.0 + std::abs(expected)));

    // Parts that only reported their lse weigh what they should.
    const Row a = from_lse(lse_of(left)), b = from_lse(lse_of(right));
    const Row merged = combine(a, b);
    EXPECT_NEAR(lse_of(merged), expected, 1e-5 * (1.0 + std::abs(expected)));
    EXPECT_NEAR(weight_of(a, merged) + weight_of(b, merged), 1.0F, 1e-5F);
  }
}

TEST(Softmax, HugeScoresStayFinite) {
  const Row row = row_of({1e4F, 1e4F, -1e4F});
  EXPECT_EQ(row.sum, 2.0F);
  EXPECT_NEAR(lse_of(row), (1e4 + 1.0) * 0.6931471805599453, 1e-2);
}

TEST(Score, ScaleAndSoftcapAreFoldedToBase2_S1) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 20.0F);
  constexpr double kLog2eExact = 1.4426950408889634;
  for (int trial = 0; trial < 500; ++trial) {
    const float qk = normal(random), scale = 0.1F * normal(random);
    const float softcap = trial % 2 == 0 ? 0.0F : std::abs(normal(random)) + 1.0F;
    const Score score = make_score(scale, softcap);
    const double x = static_cast<double>(qk) * scale;
    const double expected = softcap > 0.0F ? softcap * std::tanh(x / softcap) : x;
    EXPECT_NEAR(score2(score, qk), expected * kLog2eExact, 1e-5 * (1.0 + std::abs(expected)));
    if (score.capped) {
      const double slope = std::pow(std::cosh(x / softcap), -2.0);
      // Relative, apart from the rounding of x that the exponential magnifies and from denormals.
      EXPECT_NEAR(score_slope(score, qk), slope,
                  slope * 1e-6 * (2.0 + std::abs(x / softcap)) + 1e-37);
    }
  }
}

template <int kTerms>
void expect_capped(const Score& score, const OddPolynomial<kTerms>& series, float limit) {
  const auto pre = static_cast<double>(score.pre), post = static_cast<double>(score.post);
  for (int i = -1000; i <= 1000; ++i) {
    const auto x = static_cast<float>(static_cast<double>(limit) * i / 1000.0);
    const double expected = std::tanh(static_cast<double>(x) * pre) * post;
    EXPECT_NEAR(series(x), expected, 6e-7 * std::abs(expected)) << kTerms << " terms: " << x;
  }
}

/// tanh's polynomials keep their promised error up to their limits, at both signs, whatever the
/// cap; the kernels' choice between them, and masked scores, need the rest.
TEST(Score, SoftcapSeriesIsTanh_S1) {
  for (const float cap : {1e-9F, 1e-5F, 0.1F, 1.0F, 30.0F, 50.0F, 1e3F, 1e4F, 1e9F, 1e20F}) {
    for (const float scale : {0.0625F, 0.125F, 1.0F}) {
      SCOPED_TRACE(testing::Message() << "cap " << cap << ", scale " << scale);
      const Score score = make_score(scale, cap);
      const SoftcapSeries series = make_softcap_series(score);
      if (cap >= 0.1F && cap <= 1e3F) {
        EXPECT_NEAR(series.narrow_limit * score.pre, 0.25, 1e-6);
        EXPECT_NEAR(series.wide_limit * score.pre, 0.7, 1e-6);
      }
      EXPECT_LE(series.narrow_limit, series.wide_limit);
      if (series.wide_limit < 0.0F) continue;
      expect_capped(score, series.narrow, series.narrow_limit);
      expect_capped(score, series.wide, series.wide_limit);
      EXPECT_EQ(series.narrow(-kInfinity), -kInfinity);
      if (series.wide_limit > series.narrow_limit) {
        EXPECT_EQ(series.wide(-kInfinity), -kInfinity);
      }
    }
  }
}

/// The score that enters the softmax, in natural units.
double score_of(const Score& score, double product, double bias, double distance) {
  const double x = score2(score, static_cast<float>(product));
  return add_to_score(x, true, bias * kLog2e, true, 0.5, distance) / kLog2e;
}

TEST(Score, GradientIsTheDerivative_S1) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  for (const float softcap : {0.0F, 0.5F, 20.0F}) {
    for (int i = 0; i < 200; ++i) {
      const float scale = 0.3F;
      const Score score = make_score(scale, softcap);
      const double product = 8.0 * uniform(random), bias = uniform(random), ds = uniform(random);
      const auto x = static_cast<float>(product);
      const ScoreGradient<float> got = score_gradient(score, static_cast<float>(ds),
                                                      score.capped ? score_slope(score, x) : 0.0F);
      constexpr double kStep = 0.03125;
      const double slope = (score_of(score, product + kStep, bias, 3.0) -
                            score_of(score, product - kStep, bias, 3.0)) /
                           (2.0 * kStep);
      EXPECT_NEAR(got.product * score.scale, ds * slope, 1e-3) << "product " << product;
      const double by_bias =
          score_of(score, product, bias + 1.0, 3.0) - score_of(score, product, bias, 3.0);
      EXPECT_NEAR(got.bias, ds * by_bias, 1e-5);
    }
  }
}

TEST(Score, AlibiFallsWithDistance_S6) {
  EXPECT_NEAR(alibi2(0.5F, 8.0F), -0.5 * 8.0 * 1.4426950408889634, 1e-5);
  EXPECT_EQ(alibi2(0.5F, 0.0F), 0.0F);
}

// What a row's sum of weight * value becomes is its softmax over keys and sink; the same where the
// sink is merged as a part of its own, which gives no value.
TEST(Softmax, FinishIsTheEndOfARow_S4_S5) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 5.0F);
  for (int trial = 0; trial < 200; ++trial) {
    const float score = normal(random), sink = normal(random);
    const Row row = row_of({score, score + 1.0F});
    const double keys = std::exp2(double{score}) + std::exp2(double{score} + 1.0);
    for (const bool has_sink : {false, true}) {
      const FinishedRow<float> end = finish(row, has_sink, sink);
      const double sum = keys + (has_sink ? std::exp(double{sink}) : 0.0);
      // The unnormalised weights are exp2(score - max).
      EXPECT_NEAR(end.factor * std::exp2(-double{row.max}) * sum, 1.0, 1e-5) << has_sink;
      EXPECT_NEAR(lse_of(end.state), std::log(sum), 1e-5 * (1.0 + std::abs(std::log(sum))));
    }
    // A row without keys has only its sink.
    const FinishedRow<float> end = finish(Row{}, true, sink);
    EXPECT_NEAR(lse_of(end.state), sink, 1e-5 * (1.0 + std::abs(double{sink})));
  }
  EXPECT_EQ(finish(Row{}, false, 0.0F).factor, 0.0F);
  EXPECT_EQ(lse_of(finish(Row{}, false, 0.0F).state), -kInfinity);
}

// S7: parts known by their lse weigh what their keys weigh together; those without keys nothing;
// and NaN is not lost.
TEST(Softmax, PartsWeighTheirShare_S7) {
  const float lses[] = {2.0F, -kInfinity, -3.0F, 2.5F};
  Row merged;
  double sum = 0.0;
  for (const float lse : lses) merged = combine(merged, from_lse(lse));
  for (const float lse : lses) sum += std::exp(double{lse});
  for (const float lse : lses) {
    EXPECT_NEAR(weight_of(from_lse(lse), merged), std::exp(double{lse}) / sum, 1e-6);
  }
  EXPECT_EQ(weight_of(from_lse(-kInfinity), merged), 0.0F);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Row& row : {combine(merged, from_lse(nan)), combine(from_lse(nan), merged),
                         combine(combine(from_lse(-kInfinity), from_lse(nan)), from_lse(1.0F))}) {
    EXPECT_TRUE(std::isnan(lse_of(row)));
    EXPECT_TRUE(std::isnan(weight_of(from_lse(2.0F), row)));
  }
}

}  // namespace
}  // namespace tessera::core
