// The reference against what can be worked out by hand, rule by rule.
#include "reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference/problem_data.h"
#include "reference/storage.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Problem parse(const std::string& text) {
  const Result<Problem> problem = parse_problem(text);
  EXPECT_TRUE(problem.ok()) << problem.status().text;
  EXPECT_TRUE(validate(*problem).ok()) << validate(*problem).text;
  return *problem;
}

std::uint64_t fresh_seed() {
  std::random_device device;
  const std::uint64_t seed = device();
  ::testing::Test::RecordProperty("seed", std::to_string(seed));
  return seed;
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // infinities
    EXPECT_NEAR(a[i], b[i], 1e-12 * (1.0 + std::fabs(b[i]))) << what << "[" << i << "]";
  }
}

void expect_equal_outputs(const reference::Outputs& a, const reference::Outputs& b) {
  expect_near(a.o, b.o, "o");
  expect_near(a.lse, b.lse, "lse");
  expect_near(a.dq, b.dq, "dq");
  expect_near(a.dk, b.dk, "dk");
  expect_near(a.dv, b.dv, "dv");
}

/// One query and three keys of head_dim 1, worked out term by term in the order of S1.
TEST(Reference, OrderS1) {
  ProblemData data(parse("fwd f32 q=1 k=3 d=1 scale=0.5 softcap=2 alibi=h bias=k sink"), 1);
  data.q = {1.5F};
  data.k = {1.0F, -2.0F, 4.0F};
  data.v = {1.0F, 10.0F, 100.0F};
  data.bias = {0.25F, -0.5F, 1.0F};
  data.alibi_slopes = {0.5F};
  data.sink = {0.75F};
  const double s0 = 2 * std::tanh(0.5 * 1.5 * 1 / 2) + 0.25 - 0.5 * 2;
  const double s1 = 2 * std::tanh(0.5 * 1.5 * -2 / 2) - 0.5 - 0.5 * 1;
  const double s2 = 2 * std::tanh(0.5 * 1.5 * 4 / 2) + 1.0;
  const double sum = std::exp(s0) + std::exp(s1) + std::exp(s2) + std::exp(0.75);
  const reference::Outputs out = data.reference();
  EXPECT_NEAR(out.lse[0], std::log(sum), 1e-14);
  EXPECT_NEAR(out.o[0], (std::exp(s0) + 10 * std::exp(s1) + 100 * std::exp(s2)) / sum, 1e-12);
}

TEST(Reference, DefaultScale) {
  ProblemData data(parse("fwd f32 q=1 k=1 d=16"), fresh_seed());
  double qk = 0.0;
  for (std::size_t i = 0; i < 16; ++i) {
    qk += static_cast<double>(data.q[i]) * static_cast<double>(data.k[i]);
  }
  EXPECT_NEAR(data.reference().lse[0], qk / 4, 1e-12);
}

/// Which keys a query sees, listed by hand.
TEST(Reference, AlignmentAndWindowS2S3) {
  const struct {
    const char* text;
    std::vector<std::string> rows;  // x: visible
  } pictures[] = {
      {"q=2 k=4 causal", {"xxx.", "xxxx"}},
      {"q=2 k=4 causal align=tl", {"x...", "xx.."}},
      {"q=4 k=2 causal", {"..", "..", "x.", "xx"}},
      {"q=4 k=2 causal align=tl", {"x.", "xx", "xx", "xx"}},
      {"q=3 k=5 window=1,0", {".xx..", "..xx.", "...xx"}},
      {"q=3 k=5 window=1,1 align=tl", {"xx...", "xxx..", ".xxx."}},
      {"q=3 k=5 window=0,-1", {"..xxx", "...xx", "....x"}},
      {"q=3 k=3 window=-1,1", {"xx.", "xxx", "xxx"}},
      {"q=4 k=2 window=0,0", {"..", "..", "x.", ".x"}},
      {"q=2 k=2", {"xx", "xx"}},
  };
  for (const auto& picture : pictures) {
    const ProblemData data(parse(std::string("fwd f32 d=1 ") + picture.text), 1);
    const reference::Inputs inputs(data.problem, data.tensors());
    for (std::size_t i = 0; i < picture.rows.size(); ++i) {
      for (std::size_t j = 0; j < picture.rows[i].size(); ++j) {
        EXPECT_EQ(inputs.visible(inputs.sequence(0), static_cast<std::int64_t>(i),
                                 static_cast<std::int64_t>(j)),
                  picture.rows[i][j] == 'x')
            << picture.text << ", query " << i << ", key " << j;
      }
    }
  }
}

TEST(Reference, EmptyRowS4) {
  const reference::Outputs out = ProblemData(parse("bwd f32 q=3 k=1 d=2 causal"), 1).reference();
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(out.o[i], 0.0);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(out.dq[i], 0.0);
  EXPECT_EQ(out.lse[0], -kInfinity);
  EXPECT_EQ(out.lse[1], -kInfinity);
  EXPECT_TRUE(std::isfinite(out.lse[2]));
}

TEST(Reference, EmptyRowWithSinkS4) {
  ProblemData data(parse("bwd f32 q=2 k=0 d=2 sink"), 1);
  data.dlse = {3.0F, 4.0F};
  const reference::Outputs out = data.reference();
  EXPECT_NEAR(out.lse[0], static_cast<double>(data.sink[0]), 1e-15);
  EXPECT_EQ(out.o[0], 0.0);
  EXPECT_NEAR(out.dsink[0], 7.0, 1e-12);  // lse is the sink itself
}

TEST(Reference, BiasOfMinusInfinityMasks) {
  ProblemData masked(parse("fwd f32 q=2 k=3 d=2 bias=qk"), fresh_seed());
  const auto inf = std::numeric_limits<float>::infinity();
  masked.bias = {0, -inf, -inf, 0, 0, -inf};
  ProblemData causal(parse("fwd f32 q=2 k=3 d=2 causal align=tl"), 1);
  causal.q = masked.q;
  causal.k = masked.k;
  causal.v = masked.v;
  expect_equal_outputs(masked.reference(), causal.reference());
  masked.bias.assign(6, -inf);
  EXPECT_EQ(masked.reference().lse[0], -kInfinity);
  EXPECT_EQ(masked.reference().o[0], 0.0);
}

TEST(Reference, AlibiDistanceIgnoresAlignmentS6) {
  const ProblemData data(parse("fwd f32 q=2 k=5 d=1 alibi=h align=tl"), 1);
  const reference::Inputs inputs(data.problem, data.tensors());
  const auto slope = static_cast<double>(data.alibi_slopes[0]);
  EXPECT_DOUBLE_EQ(inputs.alibi(0, 0, 0, 0), -slope * 3);
  EXPECT_DOUBLE_EQ(inputs.alibi(0, 0, 0, 3), 0.0);
  EXPECT_DOUBLE_EQ(inputs.alibi(0, 0, 1, 1), -slope * 3);
}

/// The published known-answer vectors of Philox4x32-10.
TEST(Reference, PhiloxS8) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(reference::philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(reference::philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(reference::philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                                     {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Reference, DropoutKeepsTheExpectedShareS8) {
  const std::uint64_t seed = fresh_seed();
  for (const float p : {0.1F, 0.5F, 0.9F}) {
    const reference::Dropout dropout(p, seed, 7);
    int dropped = 0;
    double sum = 0.0;
    constexpr int kCount = 40000;
    for (int j = 0; j < kCount; ++j) {
      const double factor = dropout.factor(1, 2, j / 100, j % 100);
      dropped += factor == 0.0 ? 1 : 0;
      sum += factor;
    }
    EXPECT_NEAR(dropped / double{kCount}, static_cast<double>(p), 0.015) << "seed " << seed;
    EXPECT_NEAR(sum / kCount, 1.0, 0.08) << "seed " << seed;
  }
}

TEST(Reference, TheLibraryShowsTheSameMaskS8) {
  const std::uint64_t seed = fresh_seed();
  for (const char* text : {"fwd f32 b=2 h=4/2 q=3 k=29 d=1 dropout=0.3", "fwd f32 q=5 k=8 d=1",
                           "bwd bf16 b=3 h=2 q=7 k=1 d=1 packed=9,2 dropout=0.9999"}) {
    const Problem p = parse(text);
    const reference::Dropout dropout(p.dropout_p, seed, seed + 3);
    std::vector<std::uint8_t> expected;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t h = 0; h < p.num_heads; ++h) {
        for (std::int64_t i = 0; i < p.seqlen_q; ++i) {
          for (std::int64_t j = 0; j < p.seqlen_k; ++j)
            expected.push_back(dropout.factor(b, h, i, j) == 0.0 ? 0 : 1);
        }
      }
    }
    expected.push_back(77);  // behind the mask
    std::vector<std::uint8_t> keep(expected.size(), 77);
    ASSERT_TRUE(dropout_mask(p, seed, seed + 3, keep.data()).ok());
    EXPECT_EQ(keep, expected) << text << ", seed " << seed;
  }
}

TEST(Reference, LseIsTakenBeforeDropoutS8) {
  const std::uint64_t seed = fresh_seed();
  const ProblemData dropped(parse("fwd f32 b=2 h=2 q=5 k=7 d=3 dropout=0.5"), seed);
  const ProblemData plain(parse("fwd f32 b=2 h=2 q=5 k=7 d=3"), seed);
  expect_near(dropped.reference().lse, plain.reference().lse, "lse");
  EXPECT_NE(dropped.reference().o, plain.reference().o);
}

/// Query head h reads key/value head h / group: the same as key/value heads written out.
TEST(Reference, GroupedHeadsS10) {
  const ProblemData grouped(parse("fwd f32 h=4/2 q=3 k=3 d=2"), fresh_seed());
  ProblemData full(parse("fwd f32 h=4 q=3 k=3 d=2"), 1);
  full.q = grouped.q;
  for (std::size_t row = 0; row < 3; ++row) {
    for (std::size_t h = 0; h < 4; ++h) {
      for (std::size_t x = 0; x < 2; ++x) {
        full.k[(row * 4 + h) * 2 + x] = grouped.k[(row * 2 + h / 2) * 2 + x];
        full.v[(row * 4 + h) * 2 + x] = grouped.v[(row * 2 + h / 2) * 2 + x];
      }
    }
  }
  expect_equal_outputs(grouped.reference(), full.reference());
}

/// A packed problem of equal sequences is the dense one, but for the order of lse (S5).
TEST(Reference, PackedS11) {
  const std::uint64_t seed = fresh_seed();
  const std::string options = " b=3 h=2/1 q=2 k=4 d=3 causal alibi=bh dropout=0.3 bias=bk";
  const ProblemData dense(parse("bwd f32" + options), seed);
  ProblemData packed(parse("bwd f32" + options + " packed=6,12"), seed, {0, 2, 4, 6},
                     {0, 4, 8, 12});
  for (std::size_t b = 0; b < 3; ++b) {
    for (std::size_t h = 0; h < 2; ++h) {
      for (std::size_t i = 0; i < 2; ++i) {
        packed.dlse[h * 6 + b * 2 + i] = dense.dlse[(b * 2 + h) * 2 + i];
      }
    }
  }
  reference::Outputs a = dense.reference(), b = packed.reference();
  EXPECT_EQ(a.lse[1 * 4 + 1 * 2 + 0], b.lse[1 * 6 + 1 * 2 + 0]);
  expect_near(a.dbias, b.dbias, "dbias");
  a.lse.clear();
  b.lse.clear();
  expect_equal_outputs(a, b);
}

TEST(Storage, EverySixteenBitPatternReadsBack) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const auto in = static_cast<std::uint16_t>(bits);
      const double value = reference::load(dtype, &in, 0);
      std::uint16_t out = 0;
      reference::store(dtype, &out, 0, value);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(reference::load(dtype, &out, 0)));
      } else {
        EXPECT_EQ(in, out) << to_string(dtype) << " " << value;
      }
    }
  }
}

TEST(Storage, EveryEightBitPatternReadsBack_S14) {
  for (const Dtype dtype : {Dtype::e4m3, Dtype::i8}) {
    for (int bits = 0; bits < 256; ++bits) {
      const auto in = static_cast<std::uint8_t>(bits);
      const double value = reference::load(dtype, &in, 0);
      std::uint8_t out = 0;
      reference::store(dtype, &out, 0, value);
      if (std::isnan(value)) {
        EXPECT_EQ(in & 0x7F, 0x7F);
        EXPECT_EQ(out & 0x7F, 0x7F);
      } else if (dtype == Dtype::i8 && bits == 128) {
        EXPECT_EQ(value, -128.0);  // read, but not made
        EXPECT_EQ(static_cast<std::int8_t>(out), -127);
      } else {
        EXPECT_EQ(in, out) << to_string(dtype) << " " << value;
      }
    }
  }
}

TEST(Storage, EightBitsRoundToNearestEvenAndSaturate_S14) {
  const auto e4m3 = [](float x) { return reference::round_to(Dtype::e4m3, x); };
  for (unsigned bits = 0; bits < 0x7E; ++bits) {
    const auto low = static_cast<std::uint8_t>(bits), high = static_cast<std::uint8_t>(bits + 1);
    const double a = reference::load(Dtype::e4m3, &low, 0),
                 b = reference::load(Dtype::e4m3, &high, 0);
    const auto middle = static_cast<float>((a + b) / 2);
    const double even = bits % 2 == 0 ? a : b;
    ASSERT_EQ(static_cast<double>(e4m3(middle)), even) << bits;
    ASSERT_EQ(static_cast<double>(e4m3(-middle)), -even) << bits;
    ASSERT_EQ(static_cast<double>(e4m3(std::nextafter(middle, HUGE_VALF))), b) << bits;
    ASSERT_EQ(static_cast<double>(e4m3(std::nextafter(middle, 0.0F))), a) << bits;
  }
  for (const float x : {448.0F, 449.0F, 464.0F, 465.0F, 1e30F, HUGE_VALF}) {
    EXPECT_EQ(e4m3(x), 448.0F) << x;
    EXPECT_EQ(e4m3(-x), -448.0F) << x;
  }
  EXPECT_TRUE(std::isnan(e4m3(std::nanf(""))));
  EXPECT_EQ(reference::round_to(Dtype::i8, 2.5F), 2.0F);
  EXPECT_EQ(reference::round_to(Dtype::i8, -3.5F), -4.0F);
  EXPECT_EQ(reference::round_to(Dtype::i8, 127.6F), 127.0F);
  EXPECT_EQ(reference::round_to(Dtype::i8, -1e9F), -127.0F);
}

/// Halfway between two neighbours: the even one; anything else: the nearer one.
TEST(Storage, RoundsToNearestEven) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    for (unsigned bits = 0; bits < (dtype == Dtype::bf16 ? 0x7F7FU : 0x7BFFU); ++bits) {
      const auto low = static_cast<std::uint16_t>(bits),
                 high = static_cast<std::uint16_t>(bits + 1);
      const double a = reference::load(dtype, &low, 0), b = reference::load(dtype, &high, 0);
      const auto middle = static_cast<float>((a + b) / 2);
      if (static_cast<double>(middle) != (a + b) / 2) continue;  // below fp32's own range
      const double even = bits % 2 == 0 ? a : b;
      ASSERT_EQ(static_cast<double>(reference::round_to(dtype, middle)), even) << bits;
      ASSERT_EQ(static_cast<double>(reference::round_to(dtype, -middle)), -even) << bits;
      const float above = std::nextafter(middle, HUGE_VALF), below = std::nextafter(middle, 0.0F);
      ASSERT_EQ(static_cast<double>(reference::round_to(dtype, above)), b) << bits;
      ASSERT_EQ(static_cast<double>(reference::round_to(dtype, below)), a) << bits;
    }
  }
  EXPECT_EQ(reference::round_to(Dtype::f16, 65519.0F), 65504.0F);
  EXPECT_TRUE(std::isinf(reference::round_to(Dtype::f16, 65520.0F)));
}

}  // namespace
}  // namespace tessera
