// attend() on the fake driver: which device it takes, whose memory it refuses, and that its
// workspace comes and goes in the order of the stream.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "cuda/fake_code.h"
#include "cuda/fake_driver.h"
#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

using Enqueued = std::vector<std::pair<std::string, void*>>;

Problem problem_of(const std::string& text) {
  const Result<Problem> problem = parse_problem(text);
  EXPECT_TRUE(problem.ok()) << problem.status().text;
  return *problem;
}

/// Every tensor of a problem has a block of memory of its own.
class Attend : public testing::Test {
 protected:
  static constexpr std::size_t kBytes = 4096;

  void SetUp() override { fake::state() = {}; }

  void* block(std::size_t number) { return memory_.data() + number * kBytes; }

  /// One sequence, one head, 64 columns; every extra that a tensor goes with.
  Tensors tensors_of(const Problem& p) {
    Tensors t;
    t.q = {block(0), 0, 64, 64};
    t.k = {block(1), 0, 64, 64};
    t.v = {block(2), 0, 64, 64};
    t.o = {block(3), 0, 64, 64};
    t.softmax_lse = static_cast<float*>(block(4));
    if (p.bias) t.bias = {block(5), 0, 0, 0, 0};
    if (p.alibi != PerHead::none) t.alibi_slopes = static_cast<const float*>(block(6));
    if (p.sink) t.sink = static_cast<const float*>(block(7));
    if (p.packed) {
      t.cu_seqlens_q = static_cast<const std::int32_t*>(block(8));
      t.cu_seqlens_k = static_cast<const std::int32_t*>(block(9));
    }
    if (p.pass == Pass::forward) return t;
    t.dout = {block(10), 0, 64, 64};
    t.dsoftmax_lse = static_cast<const float*>(block(11));
    t.dq = {block(12), 0, 64, 64};
    t.dk = {block(13), 0, 64, 64};
    t.dv = {block(14), 0, 64, 64};
    if (p.bias) t.dbias = {block(15), 0, 0, 0, 0};
    if (p.sink) t.dsink = static_cast<float*>(block(16));
    return t;
  }

  /// Says where a block lies; what is said of it later counts.
  void place(std::size_t number, unsigned type, int ordinal, bool managed = false) {
    fake::state().ranges.push_back({block(number), kBytes, type, managed, ordinal});
  }
  void place_all(unsigned type, int ordinal, bool managed = false) {
    for (std::size_t i = 0; i < kBlocks; ++i) place(i, type, ordinal, managed);
  }

  static constexpr unsigned kHost = 1, kDevice = 2;  // CUmemorytype
  static constexpr std::size_t kBlocks = 17;
  cuda::FakeCode code_;
  alignas(kBytes) std::array<std::byte, kBlocks * kBytes> memory_ = {};
};

constexpr const char* kEverything = " h=1 q=4 k=4 d=64 packed=4,4 bias=1 alibi=h sink";

// Also for managed memory.
TEST_F(Attend, TheDeviceIsTheOneThatQLiesOn) {
  if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
  const Problem problem = problem_of("fwd bf16 h=1 q=4 k=4 d=64");
  for (const bool managed : {false, true}) {
    for (const int ordinal : {0, 1}) {
      fake::state() = {};
      place_all(kDevice, ordinal, managed);
      int stream = 0;
      Execution execution;
      execution.stream = &stream;
      const Status status = attend(problem, tensors_of(problem), execution);
      ASSERT_TRUE(status) << status.text;
      EXPECT_EQ(fake::state().last.context, fake::context_of(ordinal));
      EXPECT_EQ(fake::state().enqueued, (Enqueued{{"cuLaunchKernelEx", &stream}}));
    }
  }
}

// Without queries it is the one of the keys: their gradients are zeros, to be written there.
TEST_F(Attend, TheDeviceIsThatOfTheFirstTensorWithElements) {
  if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
  const Problem problem = problem_of("bwd bf16 h=1 q=0 k=4 d=64");
  place_all(kDevice, 1);
  place(0, 0, 0);
  const Status status = attend(problem, tensors_of(problem));
  ASSERT_TRUE(status) << status.text;
  EXPECT_EQ(fake::state().last.context, fake::context_of(1));
}

TEST_F(Attend, TheWorkspaceComesAndGoesInTheOrderOfTheStream) {
  if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
  const Problem problem = problem_of("bwd bf16 h=1 q=4 k=4 d=64");
  place_all(kDevice, 1);
  int stream = 0;
  Execution execution;
  execution.stream = &stream;
  const Status status = attend(problem, tensors_of(problem), execution);
  ASSERT_TRUE(status) << status.text;
  EXPECT_EQ(fake::state().enqueued, (Enqueued{{"cuMemAllocAsync", &stream},
                                              {"cuLaunchKernelEx", &stream},
                                              {"cuLaunchKernelEx", &stream},
                                              {"cuMemFreeAsync", &stream}}));
  for (const char* waits : {"cuStreamSynchronize", "cuMemAlloc", "cuMemFree"}) {
    EXPECT_EQ(fake::state().calls[waits], 0) << waits;
  }
}

// Who calls attend() need not know what the copy engine takes.
TEST_F(Attend, TensorsAreTakenAsTheyLie) {
  if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
  const Problem problem = problem_of("fwd bf16 h=1 q=4 k=4 d=64");
  place_all(kDevice, 0);
  Tensors tensors = tensors_of(problem);
  ASSERT_TRUE(attend(problem, tensors));
  EXPECT_FALSE(fake::state().last.kernel.ends_with("_any")) << fake::state().last.kernel;
  tensors.k.stride_seqlen = 65;
  ASSERT_TRUE(attend(problem, tensors));
  EXPECT_TRUE(fake::state().last.kernel.ends_with("_any")) << fake::state().last.kernel;
}

TEST_F(Attend, WhatTheDriverRefusesIsSaidAndNoMemoryIsLost) {
  if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
  const Problem problem = problem_of("bwd bf16 h=1 q=4 k=4 d=64");
  for (const char* call :
       {"cuPointerGetAttributes", "cuMemAllocAsync", "cuLaunchKernelEx", "cuMemFreeAsync"}) {
    fake::state() = {};
    place_all(kDevice, 0);
    fake::state().failures = {{call, 700}};
    const Status status = attend(problem, tensors_of(problem));
    EXPECT_EQ(status.code, Code::device) << call;
    EXPECT_NE(status.text.find(std::string(call) + ": CUDA_ERROR_ILLEGAL_ADDRESS"),
              std::string::npos)
        << status.text;
    const bool allocated =
        call == std::string("cuLaunchKernelEx") || call == std::string("cuMemFreeAsync");
    EXPECT_EQ(fake::state().calls["cuMemFreeAsync"], allocated ? 1 : 0) << call;
  }
}

// The C ABI is the same door, and a run on a stream goes through the same structure.
TEST_F(Attend, TheCAbiEnqueuesOnItsStream) {
  if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
  char error[256] = "";
  tessera_problem problem;
  tessera_problem_init(&problem, sizeof problem);
  ASSERT_EQ(tessera_problem_parse("fwd bf16 h=1 q=4 k=4 d=64", &problem, error, sizeof error), 0);
  tessera_tensors tensors;
  tessera_tensors_init(&tensors, sizeof tensors);
  tensors.q = {block(0), 0, 64, 64};
  tensors.k = {block(1), 0, 64, 64};
  tensors.v = {block(2), 0, 64, 64};
  tensors.o = {block(3), 0, 64, 64};
  place_all(kDevice, 1);
  int stream = 0;
  tessera_execution execution;
  tessera_execution_init(&execution, sizeof execution);
  execution.stream = &stream;
  for (const char* device : {static_cast<const char*>(nullptr), "gpu:1"}) {
    fake::state().last = {};
    ASSERT_EQ(tessera_attend(&problem, &tensors, device, &execution, error, sizeof error), 0)
        << error;
    EXPECT_EQ(fake::state().last.stream, &stream);
    EXPECT_EQ(fake::state().last.context, fake::context_of(1));
  }
  EXPECT_EQ(tessera_attend(&problem, &tensors, "gpu", &execution, error, sizeof error),
            TESSERA_INVALID);
  EXPECT_STREQ(error,
               "q: lies in memory of gpu:1; attention on gpu:0 takes its own and managed "
               "memory");
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_plan_create(&problem, "gpu:1", &plan, error, sizeof error), 0) << error;
  fake::state().last = {};
  ASSERT_EQ(tessera_run(plan, &tensors, nullptr, 0, &execution, error, sizeof error), 0) << error;
  EXPECT_EQ(fake::state().last.stream, &stream);
  tessera_plan_destroy(plan);
}

/// Every key is the same: outputs are the mean of the values.
TEST_F(Attend, HostMemoryIsTheCpus) {
  const Problem problem = problem_of("fwd f32 h=1 q=1 k=4 d=64");
  const Tensors tensors = tensors_of(problem);
  auto* const v = static_cast<float*>(block(2));
  const auto* const o = static_cast<const float*>(block(3));
  for (std::size_t i = 0; i < 4; ++i) v[i * 64] = static_cast<float>(i);
  for (const unsigned pinned : {0U, kHost}) {
    fake::state() = {};
    place_all(pinned, 0);
    memory_[3 * kBytes] = memory_[3 * kBytes + 3] = std::byte{1};
    ASSERT_TRUE(attend(problem, tensors));
    EXPECT_EQ(*o, 1.5F);
    EXPECT_TRUE(fake::state().enqueued.empty());
  }
  // Managed memory, too, where the CPU is asked for.
  place_all(kDevice, 0, true);
  memory_[3 * kBytes] = std::byte{1};
  ASSERT_TRUE(attend(problem, tensors, this_cpu()));
  EXPECT_EQ(*o, 1.5F);
}

/// Expects that each tensor of another memory than the rest's is named, with where it lies.
TEST_F(Attend, ATensorThatLiesElsewhereIsNamed) {
  constexpr std::array<const char*, kBlocks> kNames = {"q",
                                                       "k",
                                                       "v",
                                                       "o",
                                                       "softmax_lse",
                                                       "bias",
                                                       "alibi_slopes",
                                                       "sink",
                                                       "cu_seqlens_q",
                                                       "cu_seqlens_k",
                                                       "dout",
                                                       "dsoftmax_lse",
                                                       "dq",
                                                       "dk",
                                                       "dv",
                                                       "dbias",
                                                       "dsink"};
  const Result<Device> gpu = this_gpu(1);
  ASSERT_TRUE(gpu.ok()) << gpu.status().text;
  const struct {
    unsigned type;
    int ordinal;
    const char* text;
  } others[] = {{0, 0, "host memory; "},
                {kHost, 0, "pinned host memory; "},
                {kDevice, 0, "memory of gpu:0; "}};
  for (const char* pass : {"fwd bf16", "bwd bf16"}) {
    const Problem problem = problem_of(std::string(pass) + kEverything);
    const Tensors tensors = tensors_of(problem);
    const std::size_t count = problem.pass == Pass::forward ? 10 : kBlocks;
    for (std::size_t i = 0; i < count; ++i) {
      for (const auto& other : others) {
        fake::state() = {};
        place_all(kDevice, 1);
        place(i, other.type, other.ordinal);
        const Status status = attend(problem, tensors, *gpu);
        EXPECT_EQ(status.code, Code::invalid);
        EXPECT_EQ(status.text, std::string(kNames[i]) + ": lies in " + other.text +
                                   "attention on gpu:1 takes its own and managed memory");
        if (i == 0) continue;  // nobody says gpu:1 then
        EXPECT_EQ(attend(problem, tensors).text, status.text);
      }
      fake::state() = {};
      place(i, kDevice, 1);
      const Status status = attend(problem, tensors, this_cpu());
      EXPECT_EQ(status.text, std::string(kNames[i]) +
                                 ": lies in memory of gpu:1; attention on this CPU takes the "
                                 "host's and managed memory");
      EXPECT_TRUE(fake::state().enqueued.empty());
    }
  }
}

/// Who knows where tensors lie spares the driver the questions.
TEST_F(Attend, WhereTensorsLieIsAskedUnlessItIsKnown) {
  const Problem problem = problem_of("fwd f32 h=1 q=1 k=4 d=64");
  const Tensors tensors = tensors_of(problem);
  for (const bool known : {false, true}) {
    fake::state() = {};
    place_all(kDevice, 1);
    Execution execution;
    execution.places_known = known;
    const Status status = attend(problem, tensors, this_cpu(), execution);
    EXPECT_EQ(status.ok(), known) << status.text;
    EXPECT_EQ(fake::state().calls["cuPointerGetAttributes"] == 0, known);
  }
}

// A bias has elements where no score is; its gradient there is zero, and is written.
TEST_F(Attend, ABiasGradientWithoutScoresLiesOnTheDevice) {
  for (const char* sizes : {" h=1 q=4 k=0 d=64 bias=1", " h=1 q=0 k=4 d=64 bias=k"}) {
    const Problem problem = problem_of(std::string("bwd f32") + sizes);
    Tensors tensors = tensors_of(problem);
    tensors.dbias.stride_key = 1;
    fake::state() = {};
    memory_[15 * kBytes] = std::byte{1};
    ASSERT_TRUE(attend(problem, tensors, this_cpu()));
    EXPECT_EQ(memory_[15 * kBytes], std::byte{0}) << sizes;
    place(15, kDevice, 1);
    EXPECT_EQ(attend(problem, tensors, this_cpu()).text,
              "dbias: lies in memory of gpu:1; attention on this CPU takes the host's and managed "
              "memory")
        << sizes;
  }
}

}  // namespace
}  // namespace tessera
