// The forward tile kernel of every instruction set this machine has, row by row of the catalog,
// against literal loops in double: every feature alone, in pairs and at random, odd sizes, odd
// strides, guard zones around every tensor, forced splits of the keys, any number of threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/sample.h"

namespace tessera {
namespace {

using namespace forward_sample;  // NOLINT(google-build-using-namespace): their vocabulary

void check(const Problem& p, Random& random, double sigma = 1.0) {
  forward_sample::check(core::Form::tile, p, random, sigma);
}

Problem plain(Random& random, Dtype dtype) {
  Problem p;
  p.dtype = dtype;
  p.batch = pick(random, 1, 2);
  p.num_heads = p.num_heads_k = pick(random, 1, 2);
  p.seqlen_q = pick(random, 1, 70);
  p.seqlen_k = pick(random, 1, 150);
  p.head_dim = p.head_dim_v = pick(random, 1, 40);
  return p;
}

class Forward : public testing::TestWithParam<Dtype> {
 protected:
  Forward() : random_(seed_) { RecordProperty("seed", std::to_string(seed_)); }
  void TearDown() override {
    if (HasFailure()) std::printf("seed %llu\n", static_cast<unsigned long long>(seed_));
  }
  const std::uint64_t seed_ = std::random_device{}();
  Random random_;
};

TEST_P(Forward, EveryFeatureAlone) {
  for (const Feature feature : kFeatures) {
    for (int i = 0; i < 4; ++i) {
      Problem p = plain(random_, GetParam());
      feature(p, random_);
      check(p, random_);
    }
  }
}

TEST_P(Forward, EveryPairOfFeatures) {
  for (const Feature first : kFeatures) {
    for (const Feature second : kFeatures) {
      Problem p = plain(random_, GetParam());
      first(p, random_);
      second(p, random_);
      check(p, random_);
    }
  }
}

TEST_P(Forward, RandomSubsetsOfFeatures) {
  for (int i = 0; i < 60; ++i) {
    Problem p = plain(random_, GetParam());
    for (const Feature feature : kFeatures) {
      if (pick(random_, 0, 3) == 0) feature(p, random_);
    }
    check(p, random_);
  }
}

TEST_P(Forward, EveryHeadDimEdge) {
  for (const std::int64_t d :
       {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 96, 127, 128, 192, 257, 512, 600}) {
    Problem p = plain(random_, GetParam());
    p.seqlen_q = pick(random_, 1, 40);
    p.seqlen_k = pick(random_, 1, 40);
    p.head_dim = p.head_dim_v = d;
    check(p, random_);
    p.head_dim_v = pick(random_, 1, 2 * d);
    check(p, random_);
  }
}

TEST_P(Forward, SeveralBlocksOfRowsAndKeys) {
  for (int i = 0; i < 9; ++i) {
    Problem p = plain(random_, GetParam());
    p.batch = 1;
    p.head_dim = p.head_dim_v = pick(random_, 1, 20);
    p.seqlen_q = pick(random_, 250, 540);
    p.seqlen_k = pick(random_, 250, 540);
    if (i == 1) causal(p, random_);
    if (i == 2) window(p, random_);
    if (i == 3) grouped(p, random_);
    if (i == 4 || i == 5) pages(p, random_);
    if (i == 5) causal(p, random_);
    if (i == 6 || i == 7) p.chunk = pick(random_, 50, 300);
    if (i >= 7) p.sink_tokens = pick(random_, 1, 400);
    if (i == 8) window(p, random_);
    check(p, random_);
  }
}

// S4: nothing to see, and nothing there.
TEST_P(Forward, EmptySequencesAndRows) {
  for (const std::int64_t sq : {0, 1, 5}) {
    for (const std::int64_t sk : {0, 1, 3}) {
      for (const bool with_sink : {false, true}) {
        Problem p = plain(random_, GetParam());
        p.seqlen_q = sq;
        p.seqlen_k = sk;
        p.window_right = 0;
        p.sink = with_sink;
        check(p, random_);
      }
    }
  }
}

// Scores far apart: references must be raised, more than once and by any amount.
TEST_P(Forward, LargeScores) {
  for (const double sigma : {3.0, 10.0, 60.0}) {
    for (const Feature feature : {Feature{[](Problem&, Random&) {}}, causal, sink, dropout}) {
      Problem p = plain(random_, GetParam());
      p.seqlen_k = pick(random_, 100, 400);
      p.head_dim = 8;
      p.softmax_scale = 1.0F;
      feature(p, random_);
      ASSERT_TRUE(validate(p).ok());
      check(p, random_, GetParam() == Dtype::f32 && sigma > 10 ? 20.0 : sigma);
    }
  }
}

// S9: bits depend on neither threads nor repetition.
TEST_P(Forward, BitwiseRepeatable) {
  Problem p = plain(random_, GetParam());
  p.num_heads = p.num_heads_k = 3;
  p.seqlen_q = 300;
  p.seqlen_k = 333;
  p.window_right = 0;
  for (const core::Kernel& row : rows_of(core::Form::tile)) {
    if (!refusal(row, p, this_cpu()).empty()) continue;
    for (const int split_n : {0, 64}) {
      Sample sample = make_sample(p, random_, 1.0);
      execute(sample, row, split_n, 1);
      const std::vector<std::byte> o = sample.o.array.bytes;
      const std::vector<float> lse = sample.lse;
      for (const int threads : {1, 2, 7}) {
        execute(sample, row, split_n, threads);
        EXPECT_TRUE(o == sample.o.array.bytes) << name_of(row);
        EXPECT_EQ(0, std::memcmp(lse.data(), sample.lse.data(), lse.size() * 4)) << name_of(row);
      }
    }
  }
}

// A key that no query sees is not read: NaN and infinity there change nothing.
TEST_P(Forward, UnseenKeysDoNotLeak) {
  Problem p = plain(random_, GetParam());
  p.seqlen_q = 5;
  p.seqlen_k = 90;
  p.window_left = 7;
  p.window_right = 0;
  for (const core::Kernel& row : rows_of(core::Form::tile)) {
    if (!refusal(row, p, this_cpu()).empty()) continue;
    Sample sample = make_sample(p, random_, 1.0);
    for (std::int64_t j = 0; j < 90 - 5 - 7; ++j) {
      for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t h = 0; h < p.num_heads_k; ++h) {
          sample.k.array.set(sample.k.at(b, j, h), std::nanf(""));
          sample.v.array.set(sample.v.at(b, j, h), std::nanf(""));
        }
      }
    }
    execute(sample, row, 0, 1);
    compare(sample, name_of(row));
  }
}

// softmax_lse is optional.
TEST_P(Forward, NullLse) {
  const Problem p = plain(random_, GetParam());
  for (const core::Kernel& row : rows_of(core::Form::tile)) {
    if (!refusal(row, p, this_cpu()).empty()) continue;
    for (const int split_n : {0, 16}) {
      Sample sample = make_sample(p, random_, 1.0);
      const PlanData plan = make_plan(row, p, split_n, 1);
      std::vector<std::byte> memory(plan.workspace_bytes + 64);
      void* base = memory.data();
      std::size_t space = memory.size();
      std::align(64, plan.workspace_bytes, base, space);
      Tensors tensors = sample.tensors();
      tensors.softmax_lse = nullptr;
      ASSERT_TRUE(cpu::run(plan, tensors, base, {}).ok());
      for (const float x : sample.lse) ASSERT_EQ(x, -777.0F);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Forward, testing::Values(Dtype::f32, Dtype::bf16, Dtype::f16),
                         [](const auto& dtype) { return std::string(to_string(dtype.param)); });

}  // namespace
}  // namespace tessera
