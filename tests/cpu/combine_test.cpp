// Merging partial results on the CPU: every instruction set against double, and wrong arguments.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "archs.h"
#include "partial.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

constexpr Dtype kTypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

void check(std::mt19937& random, const PartialResults& sizes, std::int64_t gap) {
  Partial partial(random, sizes, gap);
  Device device = this_cpu();
  for (const Arch arch : archs()) {
    device.arch = arch;
    partial.clear();
    const Status status = combine(partial.sizes, partial.tensors, device);
    ASSERT_TRUE(status) << status.text;
    partial.check(text_of(sizes) + " " + to_string(arch));
  }
}

class Combine : public testing::Test {
 protected:
  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

TEST_F(Combine, EveryTypeAndLayout) {
  for (const Dtype parts : kTypes) {
    for (const Dtype o : kTypes) {
      for (const std::int64_t gap : {0, 3}) check(random_, {parts, o, 5, 2, 3, 2, 64}, gap);
    }
  }
}

TEST_F(Combine, EveryHeadDim) {
  for (const std::int64_t dim : {1, 7, 8, 15, 16, 31, 33, 64, 65, 127, 128, 129, 200, 300}) {
    check(random_, {Dtype::f32, Dtype::bf16, 3, 1, 5, 3, dim}, 1);
    check(random_, {Dtype::f16, Dtype::f32, 3, 1, 5, 3, dim}, 0);
  }
}

TEST_F(Combine, EveryNumberOfSplits) {
  for (std::int64_t splits = 1; splits <= 40; ++splits) {
    check(random_, {Dtype::f32, Dtype::f32, splits, 2, 4, 2, 20}, 0);
  }
}

// S9: also where there is more than one item of work.
TEST_F(Combine, AnyNumberOfThreadsGivesTheSameBits) {
  Partial partial(random_, {Dtype::f32, Dtype::f32, 9, 2, 100, 4, 64}, 0);
  ASSERT_TRUE(combine(partial.sizes, partial.tensors));
  partial.check("default threads");
  const Elements o = partial.o, lse = partial.lse;
  for (const int threads : {1, 2, 5}) {
    Device device = this_cpu();
    device.threads = threads;
    ThreadPool pool(threads);
    const Executor executor = pool.executor();
    Execution execution;
    execution.executor = &executor;
    partial.clear();
    ASSERT_TRUE(combine(partial.sizes, partial.tensors, device, execution));
    EXPECT_TRUE(partial.o == o && partial.lse == lse) << threads;
  }
}

TEST_F(Combine, LseIsOptional) {
  Partial partial(random_, {Dtype::f32, Dtype::f32, 3, 1, 4, 2, 16}, 0);
  partial.tensors.softmax_lse.data = nullptr;
  ASSERT_TRUE(combine(partial.sizes, partial.tensors));
  partial.check("no lse");
}

TEST_F(Combine, NanInAnLseMakesItsRowNan) {
  for (const std::int64_t place : {0, 2, 6}) {
    Partial partial(random_, {Dtype::f32, Dtype::f32, 7, 1, 2, 1, 8}, 0);
    partial.lse_parts.set(partial.lse_part(place, 0, 1, 0), NAN);
    ASSERT_TRUE(combine(partial.sizes, partial.tensors));
    EXPECT_TRUE(std::isnan(partial.lse.at(Partial::row(partial.tensors.softmax_lse, 0, 1, 0))));
    EXPECT_TRUE(std::isnan(partial.o.at(Partial::row(partial.tensors.o, 0, 1, 0))));
    EXPECT_FALSE(std::isnan(partial.o.at(Partial::row(partial.tensors.o, 0, 0, 0))));
  }
}

TEST_F(Combine, WithoutRowsNothingIsNeeded) {
  for (const PartialResults& sizes : {PartialResults{.seqlen_q = 0, .head_dim_v = 8},
                                      PartialResults{.batch = 0, .seqlen_q = 3, .head_dim_v = 8}}) {
    EXPECT_TRUE(combine(sizes, {}));
  }
}

// Each names its argument, and nothing is written.
TEST_F(Combine, WrongArgumentsAreNamed) {
  const Partial good(random_, {Dtype::f32, Dtype::f32, 3, 2, 4, 2, 16}, 0);
  const struct {
    const char* text;
    void (*spoil)(PartialResults& r, PartialTensors& t);
  } all[] = {
      {"num_splits = 0", [](PartialResults& r, PartialTensors&) { r.num_splits = 0; }},
      {"num_splits = 65537", [](PartialResults& r, PartialTensors&) { r.num_splits = 65537; }},
      {"batch = -1", [](PartialResults& r, PartialTensors&) { r.batch = -1; }},
      {"seqlen_q = -1", [](PartialResults& r, PartialTensors&) { r.seqlen_q = -1; }},
      {"num_heads = 0", [](PartialResults& r, PartialTensors&) { r.num_heads = 0; }},
      {"head_dim_v = 0", [](PartialResults& r, PartialTensors&) { r.head_dim_v = 0; }},
      {"dtype = 3", [](PartialResults& r, PartialTensors&) { r.dtype = static_cast<Dtype>(3); }},
      {"dtype_o = 3",
       [](PartialResults& r, PartialTensors&) { r.dtype_o = static_cast<Dtype>(3); }},
      {"64-bit offsets",
       [](PartialResults& r, PartialTensors&) {
         r.batch = kMaxBatch;
         r.seqlen_q = INT32_MAX;
         r.num_heads = kMaxHeads;
       }},
      {"o_parts = null", [](PartialResults&, PartialTensors& t) { t.o_parts.data = nullptr; }},
      {"lse_parts = null", [](PartialResults&, PartialTensors& t) { t.lse_parts.data = nullptr; }},
      {"o = null", [](PartialResults&, PartialTensors& t) { t.o.data = nullptr; }},
      {"o_parts.stride_split",
       [](PartialResults&, PartialTensors& t) { t.o_parts.stride_split = INT64_MAX; }},
      {"lse_parts.stride_head",
       [](PartialResults&, PartialTensors& t) { t.lse_parts.stride_head = INT64_MIN; }},
      {"o.stride_head", [](PartialResults&, PartialTensors& t) { t.o.stride_head = 15; }},
      {"softmax_lse.stride_seqlen",
       [](PartialResults&, PartialTensors& t) { t.softmax_lse.stride_seqlen = 0; }},
  };
  for (const auto& one : all) {
    PartialResults sizes = good.sizes;
    PartialTensors tensors = good.tensors;
    one.spoil(sizes, tensors);
    const Status status = combine(sizes, tensors);
    EXPECT_EQ(status.code, Code::invalid) << one.text;
    EXPECT_NE(status.text.find(one.text), std::string::npos) << status.text;
  }
  Device device = this_cpu();
  Execution execution;
  Executor executor;
  executor.run = nullptr;
  execution.executor = &executor;
  EXPECT_EQ(combine(good.sizes, good.tensors, device, execution).text, "executor.run = null");
  for (std::int64_t i = 0; i < good.o.count(); ++i) ASSERT_TRUE(good.o.untouched(i));
}

}  // namespace
}  // namespace tessera
