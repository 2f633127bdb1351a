// Latent attention (S12): rows of 576 columns, of which the first 512 are values, are one problem
// as keys that overlap their values, and one as values that a second query meets. Both are the same
// attention.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "archs.h"
#include "reference/storage.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

class Latent : public testing::Test {
 protected:
  static constexpr std::int64_t kLatent = 512, kRotated = 64, kWidth = kLatent + kRotated;

  struct Result {
    std::vector<std::byte> o;
    std::vector<float> lse;
  };

  std::vector<std::byte> normal(std::int64_t rows, Dtype dtype) {
    std::vector<std::byte> x(static_cast<std::size_t>(rows * kWidth * size_of(dtype)));
    std::normal_distribution<double> distribution;
    for (std::int64_t i = 0; i < rows * kWidth; ++i) {
      reference::store(dtype, x.data(), i, distribution(random_));
    }
    return x;
  }

  /// Of the same numbers, in one product or in two.
  static Result attend_with(Problem p, bool qv, const std::vector<std::byte>& q,
                            const std::vector<std::byte>& keys, const Device& device) {
    const std::int64_t rows = p.rows_q() * p.num_heads, query = p.num_heads * kWidth;
    const std::int64_t rotated = kLatent * size_of(p.dtype);
    p.qv = qv;
    p.head_dim = qv ? kRotated : kWidth;
    Result result = {
        std::vector<std::byte>(static_cast<std::size_t>(rows * kLatent * size_of(p.dtype))),
        std::vector<float>(static_cast<std::size_t>(rows))};
    Tensors t;
    t.q = {q.data() + (qv ? rotated : 0), p.seqlen_q * query, query, kWidth};
    t.k = {keys.data() + (qv ? rotated : 0), p.seqlen_k * kWidth, kWidth, kWidth};
    t.v = {keys.data(), p.seqlen_k * kWidth, kWidth, kWidth};
    if (qv) t.qv = {q.data(), p.seqlen_q * query, query, kWidth};
    const std::int64_t output = p.num_heads * kLatent;
    t.o = {result.o.data(), p.seqlen_q * output, output, kLatent};
    t.softmax_lse = result.lse.data();
    const Status status = attend(p, t, device);
    EXPECT_TRUE(status.ok()) << status.text;
    return result;
  }

  const unsigned seed_ = std::random_device{}();
  std::mt19937 random_{seed_};
};

TEST_F(Latent, ASecondQueryIsMoreColumnsOfTheFirst_S12) {
  // Decode, alone and in splits; tiles, alone and in splits.
  for (const char* sizes :
       {"h=16/1 q=1 k=300", "h=4/1 q=2 k=2100", "h=8/1 q=9 k=300 causal", "h=32/1 q=1 k=4200"}) {
    for (const char* dtype : {"f32", "bf16", "f16"}) {
      const std::string text = std::string("fwd ") + dtype + " b=2 d=64/512 " + sizes;
      const auto problem = parse_problem(text);
      ASSERT_TRUE(problem.ok()) << problem.status().text;
      const std::vector<std::byte> q =
          normal(problem->rows_q() * problem->num_heads, problem->dtype);
      const std::vector<std::byte> keys = normal(problem->rows_k(), problem->dtype);
      // bf16 weights are rounded, and so is o.
      const double error =
          problem->dtype == Dtype::f32 ? 1e-5 : 3.0 * reference::unit_roundoff(problem->dtype);
      for (const Arch arch : archs()) {
        SCOPED_TRACE(text + " on " + to_string(arch) + " seed " + std::to_string(seed_));
        const auto device = named_device(to_string(arch));
        ASSERT_TRUE(device.ok()) << device.status().text;
        const Result one = attend_with(*problem, false, q, keys, *device);
        const Result two = attend_with(*problem, true, q, keys, *device);
        for (std::size_t i = 0; i < one.lse.size(); ++i) {
          ASSERT_NEAR(one.lse[i], two.lse[i], 1e-5) << "row " << i;
        }
        const auto count = static_cast<std::int64_t>(one.lse.size()) * kLatent;
        for (std::int64_t i = 0; i < count; ++i) {
          const double x = reference::load(problem->dtype, one.o.data(), i);
          ASSERT_NEAR(x, reference::load(problem->dtype, two.o.data(), i),
                      error * (1.0 + std::fabs(x)))
              << "element " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
