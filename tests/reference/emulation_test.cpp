// The emulation of 8-bit tensor cores: its accumulator term by term, and what it foretells of whole
// rows, which was measured on the board.
#include "reference/emulation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "reference/storage.h"

namespace tessera {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

TEST(Accumulator, CutsWhatIsTooSmallForItsSum) {
  const std::vector<double> weights(32, 256.0), ones(32, 1.0), none(32, 0.0);
  // 2^8 beside 2^21 is 2^-13 of it and stays; beside 2^22 it is lost, however many there are.
  EXPECT_EQ(reference::accumulate(0x1p21, weights, ones), 0x1p21 + 32 * 256);
  EXPECT_EQ(reference::accumulate(0x1p22, weights, ones), 0x1p22);
  EXPECT_EQ(reference::accumulate(-0x1p22, weights, ones), -0x1p22);
  EXPECT_EQ(reference::accumulate(0.0, weights, none), 0.0);
  EXPECT_EQ(reference::accumulate(3.0, weights, none), 3.0);
}

/// What is cut off 128 products of elements, subnormal ones too, and of a sum of two elements stays
/// in the bounds: 8 deviations, and the worst case.
TEST(Accumulator, CutsNoMoreThanItsBound) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto element = [](double x) {
    return static_cast<double>(reference::round_to(Dtype::e4m3, static_cast<float>(x)));
  };
  for (int trial = 0; trial < 2000; ++trial) {
    // Of one sign, or of both; of b some are so small that they are subnormal.
    const bool one_sign = trial % 2 == 0;
    const double size_of_b = std::ldexp(1.0, -static_cast<int>(random() % 9)), scale = 0.37;
    std::vector<double> whole(128), parts[2], b(128), scaled(128);
    double exact = 0.0, sum = 0.0;
    for (auto& part : parts) part.resize(128);
    for (std::size_t i = 0; i < 128; ++i) {
      const double x = 16.0 * normal(random), y = size_of_b * normal(random);
      parts[0][i] = element(one_sign ? std::fabs(x) : x);
      parts[1][i] = element((one_sign ? std::fabs(x) : x) - parts[0][i]);
      b[i] = element(one_sign ? std::fabs(y) : y);
      whole[i] = parts[0][i] + parts[1][i];
      scaled[i] = b[i] * scale;
      exact += whole[i] * scaled[i];
    }
    for (std::size_t i = 0; i < 128; i += 32) {
      for (const auto& part : parts) {
        sum = reference::accumulate(sum, {&part[i], 32}, {&b[i], 32});
      }
    }
    const reference::CutTerms cut = reference::cut_terms(whole, scaled, scale, 2);
    const double off = std::fabs(sum * scale - exact);
    EXPECT_LE(off, cut.worst) << trial;
    EXPECT_LE(off, 8.0 * std::sqrt(cut.variance)) << trial;
  }
}

TEST(Accumulator, CutsTowardsZero) {
  // Units of 2^-13: of 1 + 2^-13 + 2^-14 the last bit is lost, of either sign.
  const double x = 1.0 + 0x1p-13 + 0x1p-14;
  const std::vector<double> zero(1, 0.0);
  EXPECT_EQ(reference::accumulate(x, zero, zero), 1.0 + 0x1p-13);
  EXPECT_EQ(reference::accumulate(-x, zero, zero), -1.0 - 0x1p-13);
  // A sum in a higher binade is cut again.
  const std::vector<double> a = {1.0}, b = {1.0};
  EXPECT_EQ(reference::accumulate(1.0 + 0x1p-13, a, b), 2.0);
  // Opposite terms cancel exactly, and what was cut before is lost.
  EXPECT_EQ(reference::accumulate(1.0 + 0x1p-13, a, std::vector<double>{-1.0}), 0x1p-13);
  const std::vector<double> many = {64.0, -64.0, 0x1p-8}, units = {1.0, 1.0, 1.0};
  EXPECT_EQ(reference::accumulate(0.0, many, units), 0.0);
}

/// q, k and v of e4m3, one head, one query, scales of 1.
struct OneRow {
  Problem p;
  std::vector<std::uint8_t> q, k, v;
  float scale = 1.0F;
  std::vector<float> o;

  OneRow(std::int64_t keys, std::int64_t dim) {
    p.dtype = Dtype::e4m3;
    p.scales = {Scaling::tensor, Scaling::tensor, Scaling::tensor};
    p.seqlen_q = 1;
    p.seqlen_k = keys;
    p.head_dim = p.head_dim_v = dim;
    q.resize(size(dim));
    k.resize(size(keys * dim));
    v.resize(size(keys * dim));
    o.resize(size(dim));
  }
  reference::Inputs inputs() {
    const std::int64_t d = p.head_dim;
    Tensors t;
    t.q = {q.data(), 0, d, d};
    t.k = {k.data(), 0, d, d};
    t.v = {v.data(), 0, d, d};
    t.o = {o.data(), 0, d, d};
    t.q_scale = t.k_scale = t.v_scale = {&scale};
    return {p, t};
  }
};

double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  double error = 0.0, whole = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    whole += b[i] * b[i];
  }
  return std::sqrt(error / whole);
}

/// All scores equal, V = 1. FlashAttention-3 and cuDNN return these numbers on an H200: sums stand
/// still where a weight of 2^8 is 2^-14 of them. With promotion 1 comes back at any length.
TEST(Emulation, ConstantValuesAreLostWithoutPromotion_S14) {
  for (const std::int64_t keys : {16384, 32768, 131072}) {
    OneRow row(keys, 1);
    for (std::int64_t j = 0; j < keys; ++j) reference::store(Dtype::e4m3, row.v.data(), j, 1.0);
    const reference::Inputs inputs = row.inputs();
    EXPECT_EQ(reference::emulate(inputs, {}).o[0], 16384.0 / static_cast<double>(keys)) << keys;
    for (const std::int64_t promote : {128, 512, 2048, 16384}) {
      const reference::Outputs out = reference::emulate(inputs, {.promote_n = promote});
      EXPECT_EQ(out.o[0], 1.0) << keys << " keys, promoted after " << promote;
      EXPECT_NEAR(out.lse[0], std::log(static_cast<double>(keys)), 1e-6);
    }
  }
}

/// Values with a mean: sums lose the more the longer they go on, and rounding of weights is what is
/// left with promotion.
TEST(Emulation, ErrorsOfSumsGrowWithTheirLength_S14) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::normal_distribution<double> normal;
  OneRow row(8192, 32);
  for (std::int64_t i = 0; i < 32; ++i) {
    reference::store(Dtype::e4m3, row.q.data(), i, normal(random));
  }
  for (std::int64_t i = 0; i < row.p.seqlen_k * 32; ++i) {
    reference::store(Dtype::e4m3, row.k.data(), i, normal(random));
    reference::store(Dtype::e4m3, row.v.data(), i, normal(random) + 1.0);
  }
  const reference::Inputs inputs = row.inputs();
  const std::vector<double> exact = reference::attend(inputs).o;
  const auto error = [&](std::int64_t promote) {
    return relative_error(reference::emulate(inputs, {.promote_n = promote}).o, exact);
  };
  const double never = error(0), late = error(2048), soon = error(256);
  EXPECT_GT(never, 2.0 * late);
  EXPECT_GT(late, 1.5 * soon);
  EXPECT_GT(never, 0.04);
  EXPECT_LT(soon, 0.01);
}

/// Short rows, one block: what is left is the rounding of weights, which the sum of the rounded
/// ones takes part in; scales and shifts are applied as S14 says.
TEST(Emulation, IsTheReferenceButForItsFormats_S14) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::normal_distribution<double> normal;
  for (const bool last_first : {false, true}) {
    OneRow row(300, 48);
    row.scale = 0.7F;
    std::vector<float> shift(48, 2.5F);
    const float score_shift = 1.5F, sink = 0.25F;
    for (std::int64_t i = 0; i < 48; ++i) {
      reference::store(Dtype::e4m3, row.q.data(), i, normal(random));
    }
    for (std::int64_t i = 0; i < row.p.seqlen_k * 48; ++i) {
      reference::store(Dtype::e4m3, row.k.data(), i, normal(random));
      reference::store(Dtype::e4m3, row.v.data(), i, normal(random));
    }
    row.p.scales.score_shift = row.p.scales.v_shift = true;
    row.p.softcap = 20.0F;
    row.p.sink = true;
    Tensors t;
    t.q = {row.q.data(), 0, 48, 48};
    t.k = {row.k.data(), 0, 48, 48};
    t.v = {row.v.data(), 0, 48, 48};
    t.q_scale = t.k_scale = t.v_scale = {&row.scale};
    t.score_shift = {&score_shift, 1, 1};
    t.v_shift = {shift.data(), 48, 48};
    t.sink = &sink;
    const reference::Inputs inputs(row.p, t);
    const reference::Outputs exact = reference::attend(inputs);
    const reference::EightBitKernel kernel = {
        .block_n = 64, .promote_n = 64, .last_first = last_first};
    const reference::Outputs out = reference::emulate(inputs, kernel);
    EXPECT_LT(relative_error(out.o, exact.o), 0.02);
    EXPECT_NEAR(out.lse[0], exact.lse[0], 0.02);
  }
}

/// A reference that is not raised at once: weights up to 7 times 2^6 are still e4m3's; with an
/// offset of 8 they would saturate.
TEST(Emulation, SlackBelongsToTheOffset_S14) {
  OneRow row(256, 1);
  reference::store(Dtype::e4m3, row.q.data(), 0, 1.0);
  for (std::int64_t j = 0; j < 256; ++j) {
    // The second block's scores are 1.875 higher: 2^2.7.
    reference::store(Dtype::e4m3, row.k.data(), j, j < 128 ? 0.0 : 1.875);
    reference::store(Dtype::e4m3, row.v.data(), j, j < 128 ? 1.0 : 2.0);
  }
  const reference::Inputs inputs = row.inputs();
  const double exact = reference::attend(inputs).o[0];
  const auto error = [&](double offset, double slack) {
    const auto out =
        reference::emulate(inputs, {.promote_n = 128, .offset = offset, .slack = slack});
    return std::fabs(out.o[0] - exact) / exact;
  };
  EXPECT_LT(error(6.0, 2.8), 0.01);
  EXPECT_LT(error(8.0, 0.0), 0.01);
  EXPECT_GT(error(8.0, 2.8), 0.05);
}

/// One key of much weight, and 511 of 2^-14.4 of it: the accumulator cuts these off. A sum that is
/// a product there lacks them, too; one in fp32 does not.
TEST(Emulation, ASumThatIsAProductLosesWhatValuesLose_S14) {
  for (const double others : {1.0, 0.0}) {
    OneRow row(512, 1);
    reference::store(Dtype::e4m3, row.q.data(), 0, 1.0);
    for (std::int64_t j = 0; j < 512; ++j) {
      reference::store(Dtype::e4m3, row.k.data(), j, j == 0 ? 10.0 : 0.0);
      reference::store(Dtype::e4m3, row.v.data(), j, j == 0 ? 1.0 : others);
    }
    const reference::Inputs inputs = row.inputs();
    const auto o = [&](bool product_sum) {
      return reference::emulate(inputs, {.block_n = 512, .offset = 6.0, .product_sum = product_sum})
          .o[0];
    };
    EXPECT_EQ(o(true), 1.0) << "others of " << others;
    // Weights are rounded to 2^-9 beside 2^6.
    EXPECT_NEAR(o(false), 1.0 / (1.0 + 511.0 * 0x1p-15), 1e-6) << "others of " << others;
  }
}

/// Over all places that a reference may have in an octave.
TEST(Emulation, CastsOfWeightsAreAsLargeAsExpected_S14) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::normal_distribution<double> normal;
  OneRow row(256, 64);
  row.scale = 0.5F;
  for (std::int64_t i = 0; i < 64; ++i) {
    reference::store(Dtype::e4m3, row.q.data(), i, normal(random));
  }
  for (std::int64_t i = 0; i < row.p.seqlen_k * 64; ++i) {
    reference::store(Dtype::e4m3, row.k.data(), i, normal(random));
    reference::store(Dtype::e4m3, row.v.data(), i, normal(random));
  }
  const reference::Inputs inputs = row.inputs();
  const std::vector<double> exact = reference::attend(inputs).o;
  constexpr int kPlaces = 32;
  double energy = 0.0;
  for (int i = 0; i < kPlaces; ++i) {
    const double offset = 6.0 + static_cast<double>(i) / kPlaces;
    const std::vector<double> o =
        reference::emulate(inputs, {.promote_n = 128, .offset = offset}).o;
    for (std::size_t c = 0; c < o.size(); ++c) energy += (o[c] - exact[c]) * (o[c] - exact[c]);
  }
  const reference::WeightRounding casts = reference::weight_rounding(inputs)[0];
  EXPECT_GT(casts.energy, 0.5 * energy / kPlaces);
  EXPECT_LT(casts.energy, 2.0 * energy / kPlaces);
  EXPECT_GT(casts.count, 20.0);
  EXPECT_LT(casts.count, 256.0);
}

/// Weights that are alike are rounded alike: of two sizes, one rounding is all that moves o.
TEST(Emulation, AlikeWeightsRoundAlike_S14) {
  OneRow row(64, 1);
  reference::store(Dtype::e4m3, row.q.data(), 0, 1.0);
  for (std::int64_t j = 0; j < 64; ++j) {
    reference::store(Dtype::e4m3, row.k.data(), j, 1.0);
    reference::store(Dtype::e4m3, row.v.data(), j, static_cast<double>(j % 5));
  }
  EXPECT_NEAR(reference::weight_rounding(row.inputs())[0].energy, 0.0, 1e-20);
  reference::store(Dtype::e4m3, row.k.data(), 0, 4.0);
  const reference::WeightRounding casts = reference::weight_rounding(row.inputs())[0];
  EXPECT_GT(casts.energy, 0.0);
  EXPECT_NEAR(casts.count, 2.0, 1e-6);
}

}  // namespace
}  // namespace tessera
