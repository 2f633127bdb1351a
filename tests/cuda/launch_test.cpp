// What a run on a GPU asks of the driver, with a fake one: no GPU is needed, none is used. What a
// kernel computes is bench/gpu_check.py's business.
#include <gtest/gtest.h>

#include <array>

#include "check/check.h"
#include "check/inputs.h"
#include "cuda/fake_driver.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

class Launches : public testing::Test {
 protected:
  void SetUp() override {
    fake::state() = {};
    const Result<Device> gpu = this_gpu();
    ASSERT_TRUE(gpu.ok()) << gpu.status().text;
    gpu_ = *gpu;
    if (!runs_here("sm90.forward.bf16.d128.128x128")) {
      GTEST_SKIP() << "this build has no GPU kernels";
    }
  }

  static Problem problem_of(const char* text) {
    const Result<Problem> problem = parse_problem(text);
    EXPECT_TRUE(problem.ok()) << problem.status().text;
    return *problem;
  }

  /// Tensors of a dense problem, (batch, seqlen, heads, head_dim); q, k, v and o share memory that
  /// nobody looks at.
  Tensors tensors_of(const Problem& p) {
    Tensors t;
    const auto place = [&](auto& tensor, std::int64_t seqlen, std::int64_t heads, std::int64_t dim,
                           std::size_t at) {
      tensor.data = memory_.data() + at * 4096;
      tensor.stride_head = dim;
      tensor.stride_seqlen = heads * dim;
      tensor.stride_batch = seqlen * heads * dim;
    };
    place(t.q, p.seqlen_q, p.num_heads, p.head_dim, 0);
    place(t.k, p.seqlen_k, p.num_heads_k, p.head_dim, 1);
    place(t.v, p.seqlen_k, p.num_heads_k, p.head_dim_v, 2);
    place(t.o, p.seqlen_q, p.num_heads, p.head_dim_v, 3);
    return t;
  }

  Status enqueue(const char* text, void* stream = nullptr) {
    const Problem problem = problem_of(text);
    return enqueue(problem, tensors_of(problem), stream);
  }
  Status enqueue(const Problem& problem, const Tensors& tensors, void* stream = nullptr) {
    const Result<Plan> planned = plan(problem, gpu_);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    Execution execution;
    execution.stream = stream;
    return run(*planned, tensors, nullptr, 0, execution);
  }

  static int calls(const char* name) { return fake::state().calls[name]; }

  Device gpu_;
  alignas(4096) std::array<std::byte, std::size_t{5} * 4096> memory_ = {};
};

TEST_F(Launches, AGpuIsDescribed) {
  EXPECT_EQ(gpu_.name, "Fake H200");
  EXPECT_EQ(gpu_.arch, Arch::sm90);
  EXPECT_EQ(gpu_.threads, 132);
  EXPECT_EQ(gpu_.l2_bytes, 60 << 20);
  EXPECT_EQ(*driver_version(), "13.1");
  const Result<Device> third = this_gpu(2);
  EXPECT_NE(third.status().text.find("'gpu:2': this machine has 2 GPUs"), std::string::npos);
}

TEST_F(Launches, OtherGpusAreRefusedInASentence) {
  fake::state().attributes = {{75, 8}, {76, 6}};  // CUdevice_attribute: compute capability
  const Result<Device> gpu = this_gpu();
  EXPECT_EQ(gpu.status().code, Code::device);
  EXPECT_NE(gpu.status().text.find("compute capability 8.6; the kernels are for Hopper"),
            std::string::npos);
}

TEST_F(Launches, ARunIsOneLaunchOnTheCallersStream) {
  int stream = 0;
  ASSERT_TRUE(enqueue("fwd bf16 b=2 h=3 q=200 k=100 d=128", &stream));
  EXPECT_EQ(calls("cuLaunchKernelEx"), 1);
  EXPECT_EQ(fake::state().last.kernel, "tessera_sm90_forward_bf16_d128_128x128");
  EXPECT_EQ(fake::state().last.stream, &stream);
  EXPECT_EQ(fake::state().last.grid_x, 12U);  // two tiles of each of six heads
  EXPECT_EQ(fake::state().last.block_x, 384U);
  ASSERT_TRUE(enqueue("fwd bf16 b=2 h=300 q=200 k=100 d=128", &stream));
  EXPECT_EQ(fake::state().last.grid_x, 132U);  // one block a multiprocessor
}

// All query heads of a group in one tile.
TEST_F(Launches, FewQueriesOfAGroupAreOneTile) {
  ASSERT_TRUE(enqueue("fwd bf16 h=8/2 q=16 k=100 d=128"));
  EXPECT_EQ(fake::state().last.grid_x, 2U);
}

// Inside a CUDA graph neither is allowed.
TEST_F(Launches, ARunNeitherAllocatesNorWaits) {
  ASSERT_TRUE(enqueue("fwd bf16 h=2 q=64 k=64 d=64 causal"));
  for (const char* name : {"cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuStreamSynchronize"}) {
    EXPECT_EQ(calls(name), 0) << name;
  }
}

TEST_F(Launches, NothingIsLaunchedForNoQueries) {
  ASSERT_TRUE(enqueue("fwd bf16 h=2 q=0 k=64 d=64"));
  EXPECT_EQ(calls("cuLaunchKernelEx"), 0);
}

TEST_F(Launches, MapsAreMadeOnceForTheSameTensors) {
  const Problem problem = problem_of("fwd f16 h=2 q=72 k=88 d=128");
  Tensors tensors = tensors_of(problem);
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_EQ(calls("cuTensorMapEncodeTiled"), 3);
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_EQ(calls("cuTensorMapEncodeTiled"), 3);
  tensors.k.data = memory_.data() + std::size_t{4} * 4096;
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_EQ(calls("cuTensorMapEncodeTiled"), 4);
  tensors.k.stride_seqlen += 8;
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_EQ(calls("cuTensorMapEncodeTiled"), 5);
}

TEST_F(Launches, AFailedMapIsNotRemembered) {
  const Problem problem = problem_of("fwd f16 h=2 q=40 k=48 d=128");
  fake::state().failures["cuTensorMapEncodeTiled"] = 1;
  EXPECT_EQ(enqueue(problem, tensors_of(problem)).code, Code::device);
  fake::state().failures.clear();
  fake::state().calls.clear();
  ASSERT_TRUE(enqueue(problem, tensors_of(problem)));
  EXPECT_EQ(calls("cuTensorMapEncodeTiled"), 3);
}

// The device need not be the current one, and what is current stays so.
TEST_F(Launches, RunsInThePrimaryContextOfItsDevice) {
  int other = 0;
  fake::state().current = &other;
  gpu_ = *this_gpu(1);
  ASSERT_TRUE(enqueue("fwd bf16 h=2 q=64 k=64 d=64"));
  EXPECT_EQ(fake::state().last.context, fake::context_of(1));
  EXPECT_EQ(fake::state().current, &other);
  fake::state().current = fake::context_of(1);
  fake::state().calls.clear();
  ASSERT_TRUE(enqueue("fwd bf16 h=2 q=64 k=64 d=64"));
  EXPECT_EQ(calls("cuCtxPushCurrent"), 0);
  EXPECT_EQ(calls("cuDevicePrimaryCtxRetain"), 0);  // it is kept
}

TEST_F(Launches, WhatTheCopyEngineCannotAddressIsRefusedOrTakenByAnotherRow) {
  Problem problem = problem_of("fwd bf16 h=2 q=64 k=64 d=64");
  Tensors tensors = tensors_of(problem);
  tensors.k.stride_seqlen = 129;
  Status status = enqueue(problem, tensors);
  EXPECT_EQ(status.code, Code::invalid);
  EXPECT_NE(status.text.find("k.stride_seqlen = 129"), std::string::npos) << status.text;
  EXPECT_NE(status.text.find("unaligned"), std::string::npos) << status.text;
  tensors.v.data = static_cast<const std::byte*>(tensors.v.data) + 2;
  tensors.k.stride_seqlen = 128;
  EXPECT_NE(enqueue(problem, tensors).text.find("v.data"), std::string::npos);
  EXPECT_EQ(calls("cuLaunchKernelEx"), 0);
  fake::state().calls.clear();
  problem.unaligned = true;
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_EQ(fake::state().last.kernel, "tessera_sm90_forward_bf16_d64_128x64_any");
  EXPECT_EQ(calls("cuTensorMapEncodeTiled"), 0);
}

TEST_F(Launches, TheDriversErrorsKeepTheirNames) {
  fake::state().failures["cuLaunchKernelEx"] = 700;
  const Status status = enqueue("fwd bf16 h=2 q=64 k=64 d=64");
  EXPECT_EQ(status.code, Code::device);
  EXPECT_EQ(status.text,
            "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700): a fake of what went wrong");
}

// The checker's way to a GPU and back: nothing was computed, so every output must fail, and nothing
// beside the outputs may be damaged.
TEST_F(Launches, ACheckOfNoResultFails) {
  const Problem problem = problem_of("fwd bf16 b=2 h=4/2 q=30 k=50 d=64 causal");
  for (const bool strided : {false, true}) {
    tools::Variation variation;
    variation.strided = strided;
    const tools::CheckResult result = tools::check(problem, tools::seed_with(variation, 1), gpu_);
    ASSERT_TRUE(result.status.ok()) << result.status.text;
    EXPECT_EQ(result.kernel.ends_with(".any"), strided) << result.kernel;
    EXPECT_EQ(result.damage, "");
    EXPECT_GE(calls("cuMemcpyDtoH"), 5);  // what is judged came back from there
    ASSERT_EQ(result.verdicts.size(), 2U);
    for (const tools::Verdict& verdict : result.verdicts) {
      EXPECT_FALSE(verdict.pass()) << verdict.output;
    }
  }
  EXPECT_EQ(calls("cuMemAlloc"), calls("cuMemFree"));
  fake::state().failures["cuStreamSynchronize"] = 700;  // where a kernel's own failure shows
  EXPECT_EQ(tools::check(problem, 1, gpu_).status.code, Code::device);
}

TEST_F(Launches, BuffersCopyBothWaysAndKnowTheirEnds) {
  for (const Device& device : {gpu_, this_cpu()}) {
    Result<Buffer> buffer = Buffer::allocate(device, 100);
    ASSERT_TRUE(buffer.ok()) << buffer.status().text;
    std::array<std::byte, 100> out = {}, in = {};
    out[99] = std::byte{7};
    ASSERT_TRUE(buffer->write(out.data(), 100));
    ASSERT_TRUE(buffer->write(out.data() + 99, 1, 3));
    ASSERT_TRUE(buffer->read(in.data(), 100));
    EXPECT_EQ(in[99], std::byte{7});
    EXPECT_EQ(in[3], std::byte{7});
    EXPECT_EQ(buffer->read(in.data(), 2, 99).text, "bytes = 2, offset = 99: the buffer has 100");
    EXPECT_EQ(buffer->write(in.data(), 1, 101).code, Code::invalid);
  }
  EXPECT_EQ(calls("cuMemAlloc"), 1);
  EXPECT_EQ(calls("cuMemFree"), 1);
  fake::state().failures["cuMemAlloc"] = 2;
  EXPECT_EQ(Buffer::allocate(gpu_, 8).status().code, Code::device);
}

}  // namespace
}  // namespace tessera
