// The judge judged: it must pass what is right and fail what is a little wrong.
#include "check/judge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "check/problems.h"
#include "check/runs.h"
#include "reference/naive.h"
#include "reference/noise.h"

namespace tessera::tools {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Judge, NaNAndWrongInfinitiesNeverPass) {
  const std::vector<double> exact = {1.0, -kInfinity}, noise = {0.0, 0.0};
  const Standard lse{"softmax_lse", &exact, &exact, &noise, Dtype::f32};
  EXPECT_TRUE(judge(lse, {1.0, -kInfinity}).pass());
  EXPECT_FALSE(judge(lse, {kNan, -kInfinity}).pass());
  EXPECT_FALSE(judge(lse, {1.0, kNan}).pass());
  EXPECT_FALSE(judge(lse, {1.0, kInfinity}).pass());
  EXPECT_FALSE(judge(lse, {1.0, -1e30}).pass());
  EXPECT_FALSE(judge(lse, {-kInfinity, -kInfinity}).pass());
  EXPECT_FALSE(judge(lse, {1.0}).pass());
  const std::vector<double> broken = {kNan, 0.0};
  EXPECT_FALSE(judge({"o", &exact, &broken, &noise, Dtype::f32}, {1.5, -kInfinity}).pass());
}

TEST(Judge, RuleOfTwoAndThree) {
  const std::vector<double> exact = {1.0}, naive = {1.25}, none = {0.0};
  EXPECT_TRUE(judge({"o", &exact, &naive, &none, Dtype::f32}, {1.5}).pass());
  EXPECT_FALSE(judge({"o", &exact, &naive, &none, Dtype::f32}, {1.51}).pass());
  EXPECT_TRUE(judge({"dq", &exact, &naive, &none, Dtype::f32}, {1.75}).pass());
  EXPECT_FALSE(judge({"dq", &exact, &naive, &none, Dtype::f32}, {0.24}).pass());
}

/// What error and bound compare with: the largest number, not an infinity that a row without keys
/// has.
TEST(Judge, TellsTheLargestMagnitude) {
  const std::vector<double> exact = {1.0, -3.5, -kInfinity}, noise = {0.5, 0.5, 0.0};
  const Verdict verdict =
      judge({"softmax_lse", &exact, &exact, &noise, Dtype::f32}, {1.25, -3.5, -kInfinity});
  EXPECT_EQ(verdict.largest, 3.5);
  EXPECT_EQ(verdict.error, 0.25);
  EXPECT_EQ(judge({"o", &exact, &exact, &noise, Dtype::f32}, {kNan, 0.0, 0.0}).largest, 3.5);
}

/// Noise counts for its own element only; the naive computation's for all.
TEST(Judge, NoiseIsElementwise) {
  const std::vector<double> exact = {1.0, 1.0}, noise = {0.5, 0.125}, near = {1.0, 1.0625};
  EXPECT_TRUE(judge({"o", &exact, &exact, &noise, Dtype::f32}, {1.5, 1.125}).pass());
  EXPECT_FALSE(judge({"o", &exact, &exact, &noise, Dtype::f32}, {1.0, 1.126}).pass());
  EXPECT_TRUE(judge({"dv", &exact, &near, &noise, Dtype::f32}, {1.0, 1.1875}).pass());
  EXPECT_FALSE(judge({"dv", &exact, &near, &noise, Dtype::f32}, {1.0, 1.1876}).pass());
  // The plain steps do not excuse lse: they round scores.
  EXPECT_FALSE(judge({"softmax_lse", &exact, &near, &noise, Dtype::f32}, {1.0, 1.1875}).pass());
}

/// One problem's results three times over.
struct Judged {
  explicit Judged(const Case& item) : memory(item.problem, item.seed()) {
    Problem forward = item.problem;
    forward.pass = Pass::forward;
    const reference::Outputs given = reference::attend({forward, memory.tensors()});
    if (item.problem.pass == Pass::backward) memory.give_forward(given.o, given.lse);
    const reference::Inputs inputs(item.problem, memory.tensors());
    exact = reference::attend(inputs);
    naive = reference::naive(inputs);
    noise = reference::noise(inputs, exact);
  }

  RunMemory memory;
  reference::Outputs exact, naive, noise;
};

constexpr struct {
  const char* name;
  std::vector<double> reference::Outputs::* values;
} kForward[] = {{"o", &reference::Outputs::o}, {"softmax_lse", &reference::Outputs::lse}},
  kBackward[] = {{"dq", &reference::Outputs::dq},
                 {"dk", &reference::Outputs::dk},
                 {"dv", &reference::Outputs::dv},
                 {"dbias", &reference::Outputs::dbias},
                 {"dsink", &reference::Outputs::dsink}};

// Fixed seeds from here on: a luckless draw would say nothing about the judge.

/// The plain steps in fp32 are kernels too. Their errors stay below the noise (a mistake in them
/// would loosen every bound), for every feature, and where numbers are many come near it (noise
/// that is too large would hide mistakes).
TEST(Judge, NaiveErrorsInFp32AreNoise) {
  int count = 0;
  double largest = 0.0;
  for (const Case& item : cases(1, 1500, Arch::portable)) {
    if (item.problem.dtype != Dtype::f32) continue;
    ++count;
    const Judged run(item);
    for (const auto& [name, values] : kForward) {
      if (item.problem.pass != Pass::forward) break;
      const Dtype stored = name == std::string("o") ? item.problem.stored_o() : Dtype::f32;
      const Verdict verdict =
          judge({name, &(run.exact.*values), &(run.exact.*values), &(run.noise.*values), stored},
                run.naive.*values);
      EXPECT_TRUE(verdict.pass()) << name << " " << item.command();
      if (verdict.error > 0.0) largest = std::max(largest, verdict.error / verdict.bound);
    }
    for (const auto& [name, values] : kBackward) {
      if (item.problem.pass != Pass::backward) break;
      // The plain steps make their own lse, of scores in fp32, where kernels are given the exact
      // one.
      const std::vector<double> zero((run.noise.*values).size());
      EXPECT_LE(max_difference(run.naive.*values, run.exact.*values),
                30.0 * max_difference(run.noise.*values, zero) + 1e-30)
          << name << " " << item.command();
    }
  }
  EXPECT_GT(count, 250);
  EXPECT_GT(largest, 0.15);
}

/// In 16 bits the plain steps round more than kernels do, yet the two alternatives are of one size.
TEST(Judge, NoiseIsOfTheSizeOfTheNaiveErrorIn16Bits) {
  for (const char* text :
       {"bwd bf16 h=2 q=60 k=70 d=32 causal", "bwd f16 h=2 q=60 k=70 d=32 sink",
        "bwd bf16 h=2 q=60 k=70 d=32 dropout=0.3", "bwd f16 h=2/1 q=60 k=70 d=32 softcap=2"}) {
    Case item;
    item.problem = parse(text);
    item.random = 1;
    const Judged run(item);
    for (auto values :
         {&reference::Outputs::dq, &reference::Outputs::dk, &reference::Outputs::dv}) {
      const std::vector<double> zero((run.noise.*values).size());
      const double error = max_difference(run.naive.*values, run.exact.*values);
      const double size = max_difference(run.noise.*values, zero);
      EXPECT_GT(size, 0.3 * error) << text;
      EXPECT_LT(size, 6.0 * error) << text;
    }
  }
}

/// Nothing to sum, nothing to err by: one key has weight 1, whatever its score.
TEST(Judge, NoiseOfOneKeyIsTheResultsRounding) {
  Case item;
  item.problem = parse("fwd bf16 h=3 q=5 k=1 d=64 scale=0.3");
  item.variation.values = Values::large;
  const Judged run(item);
  for (std::size_t i = 0; i < run.exact.o.size(); ++i) {
    EXPECT_LT(run.noise.o[i], 2.1 * 0x1p-8 * std::fabs(run.exact.o[i]));
  }
}

/// Two scores of 2^24, 6 apart: roundings of either may turn the order about, and o with it. What a
/// weight of e^-6 would move, times its error, is far less.
TEST(Judge, FarScoresMayErrByMoreThanTheirWeights) {
  Problem p;
  p.seqlen_q = p.head_dim = p.head_dim_v = 1;
  p.seqlen_k = 2;
  p.softmax_scale = 1.0F;
  const float q = 0x1p12F, k[] = {0x1p12F, 0x1p12F - 6.0F / 0x1p12F}, v[] = {1.0F, 2.0F};
  float o = 0.0F;
  Tensors t;
  t.q = {&q, 1, 1, 1};
  t.k = {k, 2, 1, 1};
  t.v = {v, 2, 1, 1};
  t.o = {&o, 1, 1, 1};
  const reference::Inputs inputs(p, t);
  const reference::Outputs noise = reference::noise(inputs, reference::attend(inputs));
  EXPECT_GT(noise.o[0], 0.5);
  EXPECT_LT(noise.o[0], 4.0);
}

/// Scores far beyond a softcap: 1 - tanh^2 is less than fp16 has numbers for, so a kernel that
/// keeps slopes in 16 bits returns 0. Noise is of the size of what that loses, and not of more.
TEST(Judge, SlopesOfASoftcapMayVanish) {
  Case item;
  item.problem = parse("bwd bf16 h=1 q=2 k=3 d=64 softcap=1 scale=40");
  item.random = 1;
  const Judged run(item);
  double largest = 0.0;
  for (std::size_t i = 0; i < run.exact.dq.size(); ++i) {
    EXPECT_GE(run.noise.dq[i], std::fabs(run.exact.dq[i]));
    largest = std::max(largest, run.noise.dq[i]);
  }
  EXPECT_GT(largest, 0x1p-30);
  EXPECT_LT(largest, 0x1p-18);
}

/// Mistakes that a kernel could make, each in one place of a reference result: all must be seen.
TEST(Judge, SeesSmallMistakes) {
  RunMemory memory(parse("fwd bf16 h=1 q=20 k=24 d=16"), seed_with({}, 1));
  const reference::Inputs inputs(memory.problem(), memory.tensors());
  const reference::Outputs exact = reference::attend(inputs);
  const reference::Outputs naive = reference::naive(inputs);
  const reference::Outputs noise = reference::noise(inputs, exact);
  const Standard o{"o", &exact.o, &naive.o, &noise.o, Dtype::bf16};
  EXPECT_TRUE(judge(o, exact.o).pass());
  EXPECT_TRUE(judge(o, naive.o).pass());
  // A few keys too few.
  Problem narrow = memory.problem();
  narrow.window_left = narrow.seqlen_k - 8;
  EXPECT_FALSE(judge(o, reference::attend({narrow, memory.tensors()}).o).pass());
  Problem scaled = memory.problem();
  scaled.softmax_scale = scaled.scale() * 1.05F;
  EXPECT_FALSE(judge(o, reference::attend({scaled, memory.tensors()}).o).pass());
  const Standard lse{"softmax_lse", &exact.lse, &naive.lse, &noise.lse, Dtype::f32};
  EXPECT_FALSE(judge(lse, naive.lse).pass());  // scores rounded to bf16
  scaled.softmax_scale = memory.problem().scale() * 1.0005F;
  EXPECT_FALSE(judge(lse, reference::attend({scaled, memory.tensors()}).lse).pass());
}

/// A write that AddressSanitizer lets pass, so that the guard zones have it to see.
__attribute__((no_sanitize("address"))) void scratch(void* start, std::ptrdiff_t element) {
  static_cast<std::uint16_t*>(start)[element] ^= 1;
}

TEST(Judge, SeesDamagedMemory) {
  const auto broken = [](auto&& harm) {
    RunMemory memory(parse("fwd f16 b=2 h=2 q=3 k=3 d=5"),
                     seed_with({Values::normal, false, true, true}, 5));
    EXPECT_EQ(memory.damage(), "");
    harm(memory.tensors());
    return memory.damage();
  };
  EXPECT_NE(broken([](Tensors& t) { scratch(t.o.data, -1); }), "");
  EXPECT_NE(broken([](Tensors& t) { scratch(const_cast<void*>(t.k.data), 0); }), "");
  EXPECT_EQ(broken([](Tensors& t) { scratch(t.o.data, 0); }), "");
  EXPECT_NE(broken([](Tensors& t) { scratch(t.softmax_lse + 12, 0); }), "");
}

}  // namespace
}  // namespace tessera::tools
