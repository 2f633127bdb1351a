// Merging partial results on a GPU: the kernel (cuda/aux/combine.h), run on the host thread by
// thread, against double; and what combine() asks of a fake driver.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/combine.h"
#include "cuda/combine_host.h"
#include "cuda/fake_code.h"
#include "cuda/fake_driver.h"
#include "partial.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

/// By so many blocks at most; more rows are left for their second turn.
void combine_on_host(const cuda::aux::CombineParams& p, Dtype parts, unsigned most_blocks) {
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(p.blocks(), most_blocks));
  host::launch(blocks, [&] {
    switch (parts) {
      case Dtype::f32: return cuda::aux::combine<Dtype::f32>(p);
      case Dtype::bf16: return cuda::aux::combine<Dtype::bf16>(p);
      case Dtype::f16: return cuda::aux::combine<Dtype::f16>(p);
      default: FAIL() << to_string(parts);
    }
  });
}

void check(std::mt19937& random, const PartialResults& sizes, std::int64_t gap,
           unsigned most_blocks = 1000) {
  Partial partial(random, sizes, gap);
  const cuda::aux::CombineParams p = cuda::combine_params(partial.sizes, partial.tensors);
  const std::string what = text_of(sizes) + " gap " + std::to_string(gap);
  const bool aligned = gap % 8 == 0;
  EXPECT_EQ(p.parts_aligned, aligned && sizes.head_dim_v * size_of(sizes.dtype) % 16 == 0) << what;
  EXPECT_EQ(p.o_aligned, aligned && sizes.head_dim_v % 4 == 0) << what;
  combine_on_host(p, sizes.dtype, most_blocks);
  partial.check(what);
}

class CombineKernel : public testing::Test {
 protected:
  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

constexpr Dtype kTypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

TEST_F(CombineKernel, EveryTypeAlignedAndNot) {
  for (const Dtype parts : kTypes) {
    for (const Dtype o : kTypes) {
      for (const std::int64_t gap : {0, 8, 3}) check(random_, {parts, o, 5, 2, 3, 2, 64}, gap);
    }
  }
}

// Fewer columns than a lane has, more than a warp has, and ends in the middle of 16 bytes.
TEST_F(CombineKernel, EveryHeadDim) {
  for (const std::int64_t dim : {1, 7, 8, 33, 36, 128, 129, 200, 256, 300, 520}) {
    check(random_, {Dtype::f32, Dtype::bf16, 3, 1, 2, 3, dim}, 0);
    check(random_, {Dtype::bf16, Dtype::f32, 3, 1, 3, 2, dim}, 8);
  }
}

// From one to more than the lanes of a row.
TEST_F(CombineKernel, EveryNumberOfSplits) {
  for (std::int64_t splits = 1; splits <= 40; ++splits) {
    check(random_, {Dtype::f32, Dtype::f32, splits, 1, 2, 4, splits % 3 == 0 ? 96 : 20}, 0);
  }
}

TEST_F(CombineKernel, BlocksTakeSeveralTurns) {
  check(random_, {Dtype::f32, Dtype::f32, 2, 3, 7, 5, 128}, 0, 3);
}

TEST_F(CombineKernel, LseIsOptional) {
  Partial partial(random_, {Dtype::f32, Dtype::f32, 3, 1, 4, 2, 16}, 0);
  partial.tensors.softmax_lse.data = nullptr;
  combine_on_host(cuda::combine_params(partial.sizes, partial.tensors), Dtype::f32, 1);
  partial.check("no lse");
}

TEST_F(CombineKernel, NanInAnLseMakesItsRowNan) {
  for (const std::int64_t place : {0, 2, 6}) {
    Partial partial(random_, {Dtype::f32, Dtype::f32, 7, 1, 2, 1, 8}, 0);
    partial.lse_parts.set(partial.lse_part(place, 0, 1, 0), NAN);
    combine_on_host(cuda::combine_params(partial.sizes, partial.tensors), Dtype::f32, 1);
    EXPECT_TRUE(std::isnan(partial.lse.at(Partial::row(partial.tensors.softmax_lse, 0, 1, 0))));
    EXPECT_TRUE(std::isnan(partial.o.at(Partial::row(partial.tensors.o, 0, 1, 0))));
    EXPECT_FALSE(std::isnan(partial.o.at(Partial::row(partial.tensors.o, 0, 0, 0))));
  }
}

// ---- the launch

using Enqueued = std::vector<std::pair<std::string, void*>>;

class CombineLaunch : public testing::Test {
 protected:
  void SetUp() override {
    fake::state() = {};
    if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
    place(partial_.tensors.o_parts.data, partial_.o_parts, 1);
    place(partial_.tensors.lse_parts.data, partial_.lse_parts, 1);
    place(partial_.tensors.o.data, partial_.o, 1);
    place(partial_.tensors.softmax_lse.data, partial_.lse, 1);
  }

  static void place(const void* data, const Elements& elements, int ordinal) {
    constexpr unsigned kDevice = 2;                                     // CUmemorytype
    const auto bytes = static_cast<std::size_t>(elements.count()) * 2;  // at least
    fake::state().ranges.push_back({data, bytes, kDevice, false, ordinal});
  }

  cuda::FakeCode code_;
  std::mt19937 random_{7};
  Partial partial_{random_, {Dtype::f32, Dtype::bf16, 4, 2, 9, 4, 128}, 0};
};

// One launch and nothing else: it can be captured in a CUDA graph.
TEST_F(CombineLaunch, ItIsOneLaunchOnTheStreamOfTheirDevice) {
  int stream = 0;
  Execution execution;
  execution.stream = &stream;
  fake::state().on_launch = [&](const fake::Launch&, const void* parameters) {
    combine_on_host(*static_cast<const cuda::aux::CombineParams*>(parameters), Dtype::f32, 1);
  };
  const Status status = combine(partial_.sizes, partial_.tensors, execution);
  fake::state().on_launch = nullptr;
  ASSERT_TRUE(status) << status.text;
  EXPECT_EQ(fake::state().enqueued, (Enqueued{{"cuLaunchKernelEx", &stream}}));
  EXPECT_EQ(fake::state().last.kernel, "combine_f32");
  EXPECT_FALSE(fake::state().last.begins_early);  // its kernel does not wait
  EXPECT_EQ(fake::state().last.context, fake::context_of(1));
  EXPECT_EQ(fake::state().last.grid_x, 9U);  // 72 rows of 16 lanes, 128 threads
  EXPECT_EQ(fake::state().last.block_x, 128U);
  for (const char* waits : {"cuStreamSynchronize", "cuMemAlloc", "cuMemAllocAsync"}) {
    EXPECT_EQ(fake::state().calls[waits], 0) << waits;
  }
  partial_.check("launch");
}

TEST_F(CombineLaunch, TheKernelIsThatOfThePartsType) {
  for (const auto& [dtype, name] : {std::pair{Dtype::f32, "combine_f32"},
                                    {Dtype::bf16, "combine_bf16"},
                                    {Dtype::f16, "combine_f16"}}) {
    partial_.sizes.dtype = dtype;
    ASSERT_TRUE(combine(partial_.sizes, partial_.tensors));
    EXPECT_EQ(fake::state().last.kernel, name);
  }
}

TEST_F(CombineLaunch, WithoutRowsNothingIsLaunched) {
  partial_.sizes.seqlen_q = 0;
  ASSERT_TRUE(combine(partial_.sizes, partial_.tensors, *this_gpu(1)));
  EXPECT_TRUE(fake::state().enqueued.empty());
}

TEST_F(CombineLaunch, ATensorThatLiesElsewhereIsNamed) {
  fake::state().ranges.pop_back();
  EXPECT_EQ(combine(partial_.sizes, partial_.tensors).text,
            "softmax_lse: lies in host memory; combine on gpu:1 takes its own and managed memory");
  const Status status = combine(partial_.sizes, partial_.tensors, this_cpu());
  EXPECT_EQ(status.code, Code::invalid);
  EXPECT_EQ(status.text.find("o_parts: lies in memory of gpu:1; combine on this CPU"), 0U)
      << status.text;
}

TEST_F(CombineLaunch, WhatTheDriverRefusesIsSaid) {
  fake::state().failures = {{"cuLaunchKernelEx", 700}};
  const Status status = combine(partial_.sizes, partial_.tensors);
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find("cuLaunchKernelEx"), std::string::npos) << status.text;
}

}  // namespace
}  // namespace tessera
