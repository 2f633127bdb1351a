// Every gradient of the reference against central differences of its own forward, on tiny problems:
// loss = sum(o * dout) + sum(lse * dlse). What a kernel is later held against is proved here.
#include <gtest/gtest.h>

#include <cmath>

#include "reference/problem_data.h"

namespace tessera {
namespace {

double loss(const ProblemData& data) {
  const reference::Outputs out = data.reference();
  double sum = 0.0;
  for (std::size_t i = 0; i < out.o.size(); ++i) {
    sum += out.o[i] * static_cast<double>(data.dout[i]);
  }
  for (std::size_t i = 0; i < out.lse.size(); ++i) {
    if (!std::isinf(out.lse[i])) sum += out.lse[i] * static_cast<double>(data.dlse[i]);
  }
  return sum;
}

/// d loss / d number by central differences.
double central_difference(const ProblemData& data, float& number, float step) {
  const float middle = number, up = middle + step, down = middle - step;
  number = up;
  const double above = loss(data);
  number = down;
  const double below = loss(data);
  number = middle;
  return (above - below) / (static_cast<double>(up) - static_cast<double>(down));
}

/// Moves every number of `input` a little up and down and compares the loss with `gradient`. Two
/// steps (Richardson) leave an error of the fourth order, below 1e-8: a factor wrong by 1e-6 shows.
void expect_gradient(ProblemData& data, std::vector<float>& input,
                     const std::vector<double>& gradient, const char* name) {
  ASSERT_EQ(input.size(), gradient.size()) << name;
  for (std::size_t i = 0; i < input.size(); ++i) {
    const double slope = (4.0 * central_difference(data, input[i], 0x1p-10F) -
                          central_difference(data, input[i], 0x1p-9F)) /
                         3.0;
    EXPECT_NEAR(gradient[i], slope, 2e-7 * (1.0 + std::fabs(slope)))
        << name << "[" << i << "] of " << to_string(data.problem);
  }
}

void expect_all_gradients(const char* text, std::vector<std::int32_t> cu_q = {},
                          std::vector<std::int32_t> cu_k = {}) {
  const Result<Problem> problem = parse_problem(text);
  ASSERT_TRUE(problem.ok()) << problem.status().text;
  ASSERT_TRUE(validate(*problem).ok()) << validate(*problem).text;
  std::random_device device;
  const std::uint64_t seed = device();
  SCOPED_TRACE(std::string(text) + ", seed " + std::to_string(seed));
  ProblemData data(*problem, seed, std::move(cu_q), std::move(cu_k));
  const reference::Outputs out = data.reference();
  expect_gradient(data, data.q, out.dq, "dq");
  expect_gradient(data, data.k, out.dk, "dk");
  expect_gradient(data, data.v, out.dv, "dv");
  if (problem->bias) expect_gradient(data, data.bias, out.dbias, "dbias");
  if (problem->sink) expect_gradient(data, data.sink, out.dsink, "dsink");
}

TEST(Gradient, PlainAndLse) { expect_all_gradients("bwd f32 b=2 h=2 q=3 k=4 d=3"); }
TEST(Gradient, OneOfEach) { expect_all_gradients("bwd f32 b=1 h=1 q=1 k=1 d=1"); }
TEST(Gradient, HeadDimsDiffer) {
  expect_all_gradients("bwd f32 h=1 q=3 k=2 d=4/2");
  expect_all_gradients("bwd f32 h=1 q=2 k=3 d=2/5");
}
TEST(Gradient, GroupedHeadsS10) { expect_all_gradients("bwd f32 b=2 h=6/2 q=2 k=3 d=2"); }
TEST(Gradient, SoftcapS1) {
  expect_all_gradients("bwd f32 b=1 h=2 q=3 k=4 d=3 softcap=0.7");
  expect_all_gradients("bwd f32 b=1 h=2/1 q=3 k=4 d=3 softcap=2 scale=-0.6");
}
TEST(Gradient, WindowsAndAlignmentS2S3) {
  for (const char* size : {"q=3 k=5", "q=5 k=3", "q=4 k=4"}) {
    for (const char* mask : {"causal", "window=1,0", "window=0,1", "window=1,-1", "window=0,0"}) {
      for (const char* align : {"align=br", "align=tl"}) {
        expect_all_gradients(
            (std::string("bwd f32 b=1 h=1 d=2 ") + size + " " + mask + " " + align).c_str());
      }
    }
  }
}
TEST(Gradient, EmptyRowsS4) {
  expect_all_gradients("bwd f32 b=2 h=1 q=5 k=2 d=2 causal");
  expect_all_gradients("bwd f32 b=2 h=1 q=5 k=2 d=2 causal sink");
  expect_all_gradients("bwd f32 b=1 h=2 q=2 k=0 d=2 sink");
  expect_all_gradients("bwd f32 b=1 h=2 q=0 k=3 d=2 sink");
}
TEST(Gradient, AlibiS6) {
  expect_all_gradients("bwd f32 b=2 h=2 q=3 k=4 d=2 alibi=h align=tl");
  expect_all_gradients("bwd f32 b=2 h=2 q=4 k=3 d=2 alibi=bh");
}
TEST(Gradient, BiasOfAnyBroadcast) {
  for (const char* dims :
       {"bhqk", "hqk", "bqk", "bhk", "bhq", "qk", "hk", "bk", "k", "q", "h", "b", "1"}) {
    expect_all_gradients((std::string("bwd f32 b=2 h=2 q=2 k=3 d=2 causal bias=") + dims).c_str());
  }
}
TEST(Gradient, Sink) {
  expect_all_gradients("bwd f32 b=2 h=4/2 q=2 k=3 d=2 sink");
  expect_all_gradients("bwd f32 b=2 h=2 q=3 k=3 d=2 sink causal softcap=1 dropout=0.3");
}
TEST(Gradient, DropoutS8) { expect_all_gradients("bwd f32 b=2 h=2 q=3 k=9 d=2 dropout=0.4"); }
TEST(Gradient, PackedS11) {
  expect_all_gradients("bwd f32 b=4 h=2/1 q=3 k=4 d=2 packed=5,7 causal sink", {0, 2, 2, 5, 5},
                       {0, 1, 3, 7, 7});
  expect_all_gradients("bwd f32 b=2 h=2 q=3 k=4 d=2/3 packed=4,6 alibi=bh dropout=0.2 bias=hqk",
                       {0, 3, 4}, {0, 2, 6});
}
TEST(Gradient, EverythingAtOnce) {
  expect_all_gradients(
      "bwd f32 b=2 h=4/2 q=4 k=6 d=3/2 window=3,1 scale=0.9 softcap=1.5 alibi=bh bias=bhqk sink "
      "dropout=0.25");
}

}  // namespace
}  // namespace tessera
