// What a run on a GPU asks of the driver, with a fake one: no GPU is needed, none is used. What a
// kernel computes is bench/gpu_check.py's business.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check/check.h"
#include "check/inputs.h"
#include "cuda/backend.h"
#include "cuda/fake_driver.h"
#include "cuda/sm90/backward_params.h"
#include "plan/plan.h"
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

  /// Tensors of a dense problem, (batch, seqlen, heads, head_dim); they share memory that nobody
  /// looks at.
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
    if (p.packed) t.cu_seqlens_q = t.cu_seqlens_k = offsets_.data();
    if (p.sink) t.sink = numbers_.data();
    if (p.alibi != PerHead::none) t.alibi_slopes = numbers_.data();
    if (p.bias) t.bias.data = numbers_.data();  // broadcast strides: nobody looks
    if (p.pass == Pass::forward) return t;
    place(t.dout, p.seqlen_q, p.num_heads, p.head_dim_v, 5);
    place(t.dq, p.seqlen_q, p.num_heads, p.head_dim, 6);
    place(t.dk, p.seqlen_k, p.num_heads_k, p.head_dim, 7);
    place(t.dv, p.seqlen_k, p.num_heads_k, p.head_dim_v, 8);
    t.softmax_lse = numbers_.data();
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
    const std::size_t bytes = planned->workspace_bytes();
    if (bytes == 0) return run(*planned, tensors, nullptr, 0, execution);
    return run(*planned, tensors, workspace_.data(), bytes, execution);
  }

  /// What was launched since SetUp: kernel and number of blocks, one after another.
  static std::string launched() {
    std::string text;
    for (const fake::Launch& launch : fake::state().launches) {
      text += launch.kernel + " " + std::to_string(launch.grid_x) + "\n";
    }
    fake::state().launches.clear();
    return text;
  }

  /// dbias of a contiguous tensor.
  void ask_for_bias(const Problem& p, Tensors& t) {
    t.dbias.data = memory_.data() + std::size_t{4} * 4096;
    t.dbias.stride_key = 1;
    t.dbias.stride_query = p.bias->keys ? p.seqlen_k : 1;
    t.dbias.stride_head =
        t.dbias.stride_query * (p.bias->queries ? std::max<std::int64_t>(p.seqlen_q, 1) : 1);
    t.dbias.stride_batch = t.dbias.stride_head * (p.bias->heads ? p.num_heads : 1);
  }

  /// What the kernels of a backward were launched with.
  struct BackwardLaunches {
    Status status;
    cuda::sm90::BackwardParams main;
    cuda::sm90::BackwardRowParams prepare, finish_rows;
    cuda::sm90::BackwardBiasParams begin, finish;
  };
  BackwardLaunches watch(const Problem& problem, const Tensors& tensors) {
    BackwardLaunches seen;
    fake::state().on_launch = [&seen](const fake::Launch& launch, const void* parameters) {
      const auto copy = [parameters](auto& to) {
        to = *static_cast<const std::remove_reference_t<decltype(to)>*>(parameters);
      };
      if (launch.kernel.find("_backward_") != std::string::npos) copy(seen.main);
      if (launch.kernel.starts_with("prepare_rows")) copy(seen.prepare);
      if (launch.kernel.starts_with("finish_rows")) copy(seen.finish_rows);
      if (launch.kernel == "begin_bias") copy(seen.begin);
      if (launch.kernel == "finish_bias") copy(seen.finish);
    };
    seen.status = enqueue(problem, tensors);
    fake::state().on_launch = nullptr;
    return seen;
  }

  static int calls(const char* name) { return fake::state().calls[name]; }

  Device gpu_;
  alignas(4096) std::array<std::byte, std::size_t{9} * 4096> memory_ = {};
  std::array<std::int32_t, 4> offsets_ = {};
  std::array<float, 4> numbers_ = {};
  /// Never touched: only its address matters.
  alignas(Plan::workspace_alignment) std::array<std::byte, Plan::workspace_alignment> workspace_;
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

// A box is what the kernel asks for at a time: queries of a tile, or of a warpgroup where two
// tiles' do not fit shared memory; keys and values of a block. Another height would run over the
// buffer.
TEST_F(Launches, BoxesAreAsHighAsTheRowsBuffers) {
  using Box = std::array<unsigned, 4>;
  // Of other lengths each: maps of the same tensors are made once.
  const struct {
    const char* problem;
    Box q, k;
  } cases[] = {
      {"fwd bf16 h=2 q=4096 k=4096 d=64", {64, 192, 1, 1}, {64, 128, 1, 1}},
      {"fwd bf16 h=2 q=4096 k=4096 d=128", {64, 192, 1, 1}, {64, 80, 1, 1}},
      {"fwd bf16 h=2 q=512 k=512 d=128 causal", {64, 128, 1, 1}, {64, 128, 1, 1}},
      {"fwd bf16 h=2 q=520 k=520 d=192/128", {64, 64, 1, 1}, {64, 128, 1, 1}},
      {"fwd bf16 h=2 q=528 k=528 d=192", {64, 64, 1, 1}, {64, 96, 1, 1}},
      {"fwd bf16 h=2 q=536 k=536 d=256", {64, 64, 1, 1}, {64, 64, 1, 1}},
      {"fwd bf16 h=8/2 q=16 k=100 d=256", {64, 4, 16, 1}, {64, 64, 1, 1}},
  };
  for (const auto& [problem, q, k] : cases) {
    fake::state().boxes.clear();
    ASSERT_TRUE(enqueue(problem)) << problem;
    EXPECT_EQ(fake::state().boxes, (std::vector<Box>{q, k, k})) << problem;
  }
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

// Sequences of one row are not one row.
TEST_F(Launches, ThePackedRowsOfAllSequencesMustBeAligned) {
  for (const char* text : {"fwd bf16 b=3 h=2 q=1 k=64 d=64 packed=3,192",
                           "bwd bf16 b=3 h=2 q=1 k=64 d=64 packed=3,192"}) {
    const Problem problem = problem_of(text);
    Tensors tensors = tensors_of(problem);
    tensors.o.stride_seqlen += 4;
    const Status status = enqueue(problem, tensors);
    EXPECT_EQ(status.code, Code::invalid) << text;
    EXPECT_EQ(status.text.substr(0, 16), "o.stride_seqlen ") << status.text;
  }
  EXPECT_EQ(launched(), "");
}

// A block for every row block and head before; then one a block of keys and key/value head, at most
// one a multiprocessor. These finish dQ themselves.
TEST_F(Launches, ABackwardIsPrepared) {
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=6/3 q=200 k=300 d=128 causal"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 48\n"  // four blocks of 64 rows
            "tessera_sm90_backward_bf16_d128_64x128 18\n");
  ASSERT_TRUE(enqueue("bwd f16 b=40 h=6/3 q=200 k=300 d=64"));
  EXPECT_EQ(launched(),
            "prepare_rows_f16 480\n"  // two of 128
            "tessera_sm90_backward_f16_d64_128x128 132\n");
  ASSERT_TRUE(enqueue("bwd bf16 b=3 h=4 q=200 k=300 d=128 packed=300,500 deterministic"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 48\n"  // as many a sequence as the longest has
            "tessera_sm90_backward_bf16_d128_64x128 36\n");
}

// A kernel after it finishes dQ where consumers have roles.
TEST_F(Launches, ABackwardInRolesIsFinished) {
  ASSERT_TRUE(enqueue("bwd f16 b=2 h=6/3 q=200 k=300 d=192/128"));
  EXPECT_EQ(launched(),
            "prepare_rows_f16 48\ntessera_sm90_backward_f16_d192v128_64x64 30\n"
            "finish_rows_f16 48\n");
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=6/3 q=200 k=300 d=64 softcap=30"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 48\ntessera_sm90_backward_bf16_d128_64x64_extra 30\n"
            "finish_rows_bf16 48\n");
}

TEST_F(Launches, ASinksGradientIsSummedWhereItIsAskedFor) {
  const Problem problem = problem_of("bwd bf16 h=4 q=64 k=64 d=128 sink");
  Tensors tensors = tensors_of(problem);
  const std::string others = "prepare_rows_bf16 4\ntessera_sm90_backward_bf16_d128_64x128 4\n";
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_EQ(launched(), others);
  tensors.dsink = numbers_.data();
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_EQ(launched(), others + "sum_sinks 4\n");
}

// dk and dv become 0 without queries, dq without keys, where no block of the main kernel could do
// it, and dsink, too. Somebody must say which tile is next.
TEST_F(Launches, ABackwardOfNothingWritesItsZeros) {
  ASSERT_TRUE(enqueue("bwd bf16 h=2 q=0 k=64 d=128"));
  EXPECT_EQ(launched(), "prepare_rows_bf16 1\ntessera_sm90_backward_bf16_d128_64x128 2\n");
  ASSERT_TRUE(enqueue("bwd bf16 h=2 q=64 k=0 d=128"));
  EXPECT_EQ(launched(), "prepare_rows_bf16 2\nfinish_rows_bf16 2\n");
  ASSERT_TRUE(enqueue("bwd bf16 h=2 q=0 k=64 d=256"));
  EXPECT_EQ(launched(), "prepare_rows_bf16 1\ntessera_sm90_backward_bf16_d256_64x64 2\n");
  ASSERT_TRUE(enqueue("bwd bf16 h=2 q=64 k=0 d=256"));
  EXPECT_EQ(launched(), "prepare_rows_bf16 2\nfinish_rows_bf16 2\n");
  // Without sequences there is no row to prepare, however long they would be.
  for (const char* text :
       {"bwd bf16 h=2 q=0 k=0 d=128 sink", "bwd bf16 b=0 h=2 q=64 k=64 d=128 sink"}) {
    const Problem problem = problem_of(text);
    Tensors tensors = tensors_of(problem);
    tensors.dsink = numbers_.data();
    ASSERT_TRUE(enqueue(problem, tensors));
    EXPECT_EQ(launched(), "sum_sinks 2\n") << text;
  }
}

// Memory of no bytes may have no address, or any.
TEST_F(Launches, ATensorWithoutRowsNeedsNoMap) {
  const std::pair<const char*, int> problems[] = {{"fwd bf16 h=2 q=64 k=0 d=128", 1},
                                                  {"bwd bf16 h=2 q=0 k=64 d=128", 2},
                                                  {"bwd bf16 h=2 q=0 k=0 d=128", 0}};
  for (const auto& [text, maps] : problems) {
    const Problem problem = problem_of(text);
    Tensors tensors = tensors_of(problem);
    if (problem.seqlen_k == 0) tensors.k.data = tensors.v.data = nullptr;
    if (problem.seqlen_q == 0) {
      tensors.q.data = tensors.dout.data = nullptr;
      tensors.o.data = tensors.dq.data = memory_.data() + 1;
    }
    fake::state().calls.clear();
    const Status status = enqueue(problem, tensors);
    EXPECT_TRUE(status) << text << ": " << status.text;
    EXPECT_LE(calls("cuTensorMapEncodeTiled"), maps) << text;  // fewer: some are remembered
  }
}

// It begins as zeros, and ends as sums where several scores share an element.
TEST_F(Launches, ABiasGradientIsBegunAndFinishedWhereItIsAskedFor) {
  const std::string others =
      "tessera_sm90_backward_bf16_d128_64x64_extra 20\nfinish_rows_bf16 16\n";
  const auto launches = [&](const std::string& shape, bool asked) {
    const Problem problem = problem_of(("bwd bf16 b=2 h=2 q=200 k=300 d=128 " + shape).c_str());
    Tensors tensors = tensors_of(problem);
    if (asked) ask_for_bias(problem, tensors);
    EXPECT_TRUE(enqueue(problem, tensors)) << shape;
    return launched();
  };
  EXPECT_EQ(launches("bias=bhqk", false), "prepare_rows_bf16 16\n" + others);
  EXPECT_EQ(launches("bias=bhqk", true), "prepare_rows_bf16 16\nbegin_bias 1875\n" + others);
  EXPECT_EQ(launches("bias=hqk", true),
            "prepare_rows_bf16 16\nbegin_bias 938\n" + others + "finish_bias 938\n");
  EXPECT_EQ(launches("bias=k", true),
            "prepare_rows_bf16 16\nbegin_bias 3\n" + others + "finish_bias 3\n");
  const Problem problem = problem_of("bwd bf16 b=8 h=16 q=1024 k=1024 d=128 bias=bhqk");
  Tensors tensors = tensors_of(problem);
  ask_for_bias(problem, tensors);
  ASSERT_TRUE(enqueue(problem, tensors));
  EXPECT_NE(launched().find("begin_bias 4096\n"), std::string::npos);  // a loop over elements
  const Problem nothing = problem_of("bwd bf16 h=2 q=0 k=64 d=128 bias=bhqk");
  tensors = tensors_of(nothing);
  ask_for_bias(nothing, tensors);
  ASSERT_TRUE(enqueue(nothing, tensors));
  EXPECT_EQ(launched(), "prepare_rows_bf16 1\ntessera_sm90_backward_bf16_d128_64x64_extra 2\n");
}

// Where no two scores share an element it stores to the gradient itself, otherwise it adds to sums
// without gaps.
TEST_F(Launches, ABackwardKnowsWhereAScoresBiasGradientGoes) {
  const auto watched = [&](const std::string& shape) {
    const Problem problem = problem_of(("bwd f16 b=2 h=4 q=30 k=50 d=64 " + shape).c_str());
    Tensors tensors = tensors_of(problem);
    ask_for_bias(problem, tensors);
    tensors.dbias.stride_query += 3;
    tensors.dbias.stride_head += 200;
    tensors.dbias.stride_batch += 2000;
    const BackwardLaunches seen = watch(problem, tensors);
    EXPECT_TRUE(seen.status) << seen.status.text;
    EXPECT_EQ(seen.begin.dbias, tensors.dbias.data) << shape;
    EXPECT_EQ(seen.main.dbias_adds, seen.begin.sums != nullptr) << shape;
    EXPECT_EQ(seen.main.dbias, seen.main.dbias_adds ? seen.begin.sums : tensors.dbias.data);
    EXPECT_EQ(seen.finish.sums, seen.begin.sums) << shape;
    EXPECT_EQ(seen.finish.dbias, seen.main.dbias_adds ? tensors.dbias.data : nullptr) << shape;
    const std::array<std::int64_t, 4> strides = {seen.main.dbias_batch, seen.main.dbias_head,
                                                 seen.main.dbias_query, seen.main.dbias_key};
    return std::pair(seen.main.dbias_adds, strides);
  };
  using Strides = std::array<std::int64_t, 4>;
  EXPECT_EQ(watched("bias=bhqk"), std::pair(false, Strides{8000, 1700, 53, 1}));
  EXPECT_EQ(watched("bias=bqk"), std::pair(true, Strides{1500, 0, 50, 1}));
  EXPECT_EQ(watched("bias=hqk"), std::pair(true, Strides{0, 1500, 50, 1}));
  EXPECT_EQ(watched("bias=bhk"), std::pair(true, Strides{200, 50, 0, 1}));
  EXPECT_EQ(watched("bias=hq"), std::pair(true, Strides{0, 30, 1, 0}));
}

// Turns are counted everywhere, but waited for only where sums have an order. There the first key
// block stores, and it is said beforehand which rows have one.
TEST_F(Launches, ABackwardTakesTurnsOnlyWhereSumsAreOrdered) {
  for (const std::string words :
       {"bf16 h=4/2 q=200 k=300 d=64", "f16 h=2 q=64 k=64 d=128 causal", "bf16 h=2 q=64 k=64 d=256",
        "bf16 h=2 q=64 k=64 d=20 softcap=30 window=5,7 align=tl",
        "f16 b=2 h=2 q=40 k=40 d=64 packed=60,70"}) {
    for (const std::string order : {"", " deterministic", " batch_invariant"}) {
      const Problem problem = problem_of(("bwd " + words + order).c_str());
      const Result<Plan> planned = plan(problem, gpu_);
      ASSERT_TRUE(planned.ok()) << planned.status().text;
      const BackwardLaunches seen = watch(problem, tensors_of(problem));
      ASSERT_TRUE(seen.status) << seen.status.text;
      const auto& regions = planned->data().regions;
      const auto address_of = [&](const char* name) -> const void* {
        const auto region = std::find_if(regions.begin(), regions.end(),
                                         [name](const auto& r) { return name == r.name; });
        return region == regions.end() ? nullptr : workspace_.data() + region->offset;
      };
      EXPECT_EQ(seen.main.in_order, !order.empty()) << words << order;
      EXPECT_EQ(seen.prepare.first_stores, seen.main.in_order) << words << order;
      EXPECT_EQ(seen.prepare.seqlen_q, seen.main.seqlen_q) << words << order;
      EXPECT_EQ(seen.prepare.seqlen_k, seen.main.seqlen_k) << words << order;
      EXPECT_EQ(seen.prepare.cu_seqlens_q, seen.main.cu_seqlens_q) << words << order;
      EXPECT_EQ(seen.prepare.cu_seqlens_k, seen.main.cu_seqlens_k) << words << order;
      EXPECT_EQ(seen.prepare.window_left, seen.main.window_left) << words << order;
      EXPECT_EQ(seen.prepare.window_right, seen.main.window_right) << words << order;
      EXPECT_EQ(seen.prepare.alignment, seen.main.alignment) << words << order;
      ASSERT_NE(address_of("turns"), nullptr) << words << order;
      EXPECT_EQ(seen.main.turns, address_of("turns")) << words << order;
      EXPECT_EQ(seen.prepare.turns, seen.main.turns) << words << order;
      EXPECT_EQ(seen.main.next_tile, address_of("next_tile")) << words << order;
      EXPECT_EQ(seen.prepare.next_tile, seen.main.next_tile) << words << order;
    }
  }
}

// Whoever finishes it.
TEST_F(Launches, ABackwardKnowsWhereItsQueryGradientGoes) {
  for (const std::string words : {"bf16 h=4/2 q=200 k=300 d=64", "f16 h=2 q=64 k=64 d=256",
                                  "f16 b=2 h=2 q=40 k=40 d=128 packed=60,70"}) {
    const Problem problem = problem_of(("bwd " + words).c_str());
    Tensors tensors = tensors_of(problem);
    tensors.dq.stride_head += 8;
    tensors.dq.stride_seqlen += 80;
    tensors.dq.stride_batch += 80000;
    const BackwardLaunches seen = watch(problem, tensors);
    ASSERT_TRUE(seen.status) << seen.status.text;
    const auto goes_there = [&](const auto& params) {
      EXPECT_EQ(params.dq, tensors.dq.data) << words;
      EXPECT_EQ(params.dq_strides.batch, problem.packed ? 0 : tensors.dq.stride_batch) << words;
      EXPECT_EQ(params.dq_strides.head, tensors.dq.stride_head) << words;
      EXPECT_EQ(params.dq_strides.seqlen, tensors.dq.stride_seqlen) << words;
      EXPECT_EQ(params.rows.dq, seen.prepare.rows.dq) << words;
    };
    goes_there(seen.main);
    if (problem.head_dim > 128) goes_there(seen.finish_rows);
  }
}

TEST_F(Launches, ABackwardKeepsToItsStreamAndContext) {
  int stream = 0, other = 0;
  fake::state().current = &other;
  gpu_ = *this_gpu(1);
  const Problem problem = problem_of("bwd bf16 h=2 q=64 k=64 d=64 causal sink bias=k");
  Tensors tensors = tensors_of(problem);
  tensors.dsink = numbers_.data();
  ask_for_bias(problem, tensors);
  ASSERT_TRUE(enqueue(problem, tensors, &stream));
  ASSERT_EQ(fake::state().launches.size(), 6U);
  for (const fake::Launch& launch : fake::state().launches) {
    EXPECT_EQ(launch.stream, &stream) << launch.kernel;
    EXPECT_EQ(launch.context, fake::context_of(1)) << launch.kernel;
  }
  EXPECT_EQ(fake::state().current, &other);
  for (const char* name : {"cuMemAlloc", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuStreamSynchronize"}) {
    EXPECT_EQ(calls(name), 0) << name;
  }
}

TEST_F(Launches, AfterAFailedLaunchThereIsNoOther) {
  fake::state().failures["cuLaunchKernelEx"] = 700;
  EXPECT_EQ(enqueue("bwd bf16 h=2 q=64 k=64 d=64").code, Code::device);
  EXPECT_EQ(calls("cuLaunchKernelEx"), 1);
}

TEST_F(Launches, TensorsThatABackwardCannotAddressAreNamed) {
  const Problem problem = problem_of("bwd bf16 b=2 h=2 q=64 k=64 d=64");
  const auto refused = [&](const auto& change) {
    Tensors tensors = tensors_of(problem);
    change(tensors);
    const Status status = enqueue(problem, tensors);
    EXPECT_EQ(status.code, Code::invalid);
    EXPECT_NE(status.text.find("unaligned"), std::string::npos) << status.text;
    return status.text.substr(0, status.text.find_first_of(".:"));
  };
  const auto moved = [](auto& tensor) {
    tensor.data = const_cast<std::byte*>(static_cast<const std::byte*>(tensor.data)) + 2;
  };
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.q); }), "q");
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.k); }), "k");
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.v); }), "v");
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.o); }), "o");
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.dout); }), "dout");
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.dq); }), "dq");
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.dk); }), "dk");
  EXPECT_EQ(refused([&](Tensors& t) { moved(t.dv); }), "dv");
  EXPECT_EQ(refused([](Tensors& t) { t.o.stride_head = 65; }), "o");
  EXPECT_EQ(refused([](Tensors& t) { t.dout.stride_batch += 4; }), "dout");
  EXPECT_EQ(refused([](Tensors& t) { t.dq.stride_seqlen += 1; }), "dq");
  EXPECT_EQ(refused([](Tensors& t) { t.dk.stride_head += 4; }), "dk");
  EXPECT_EQ(refused([](Tensors& t) { t.dv.stride_batch += 2; }), "dv");
  EXPECT_EQ(launched(), "");
}

TEST_F(Launches, ABackwardNeedsItsWorkspace) {
  const Problem problem = problem_of("bwd bf16 h=2 q=64 k=64 d=64");
  const Result<Plan> planned = plan(problem, gpu_);
  ASSERT_TRUE(planned.ok()) << planned.status().text;
  const std::size_t bytes = planned->workspace_bytes();
  const Tensors tensors = tensors_of(problem);
  ASSERT_GT(bytes, 0U);
  const Status statuses[] = {run(*planned, tensors, nullptr, bytes),
                             run(*planned, tensors, workspace_.data() + 16, bytes),
                             run(*planned, tensors, workspace_.data(), bytes - 1)};
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code, Code::workspace);
    EXPECT_NE(status.text.find("workspace"), std::string::npos) << status.text;
  }
  EXPECT_EQ(launched(), "");
}

TEST_F(Launches, WhatNoBackwardRowTakesIsRefusedWithItsReason) {
  const auto refused = [&](const std::string& words, const char* reason) {
    const Result<Plan> planned = plan(problem_of(("bwd " + words).c_str()), gpu_);
    EXPECT_EQ(planned.status().code, Code::unsupported) << words;
    EXPECT_NE(planned.status().text.find(reason), std::string::npos) << planned.status().text;
  };
  refused("f32 h=2 q=64 k=64 d=64", "the problem is f32");
  refused("bf16 h=2 q=64 k=64 d=264", "head_dim = 264");
  refused("f16 h=2 q=64 k=64 d=64/257", "head_dim_v = 257");
}

TEST_F(Launches, EveryOtherBackwardHasARow) {
  const auto kernel_of = [&](const std::string& words) {
    EXPECT_TRUE(enqueue(("bwd bf16 h=2 q=512 k=512 " + words).c_str())) << words;
    const auto& all = fake::state().launches;
    const std::string kernel = all.size() == 2 || all.size() == 3 ? all[1].kernel : launched();
    fake::state().launches.clear();
    return kernel;
  };
  for (const std::string order : {"", " deterministic", " batch_invariant"}) {
    EXPECT_EQ(kernel_of("d=64" + order), "tessera_sm90_backward_bf16_d64_128x128");
    EXPECT_EQ(kernel_of("d=72" + order), "tessera_sm90_backward_bf16_d128_64x128");
    EXPECT_EQ(kernel_of("d=192/128" + order), "tessera_sm90_backward_bf16_d192v128_64x64");
    EXPECT_EQ(kernel_of("d=256" + order), "tessera_sm90_backward_bf16_d256_64x64");
    EXPECT_EQ(kernel_of("d=20" + order), "tessera_sm90_backward_bf16_d128_64x64_any");
    EXPECT_EQ(kernel_of("d=64 unaligned" + order), "tessera_sm90_backward_bf16_d128_64x64_any");
    EXPECT_EQ(kernel_of("d=256 unaligned" + order), "tessera_sm90_backward_bf16_d256_64x64_any");
    for (const std::string extra :
         {"softcap=30", "alibi=h", "alibi=bh", "bias=bhqk", "dropout=0.1"}) {
      const std::string words = extra + order;
      EXPECT_EQ(kernel_of("d=64 " + words), "tessera_sm90_backward_bf16_d128_64x64_extra") << words;
      EXPECT_EQ(kernel_of("d=256 " + words), "tessera_sm90_backward_bf16_d256_64x64_extra");
      EXPECT_EQ(kernel_of("d=20 " + words), "tessera_sm90_backward_bf16_d128_64x64_any") << words;
    }
  }
}

TEST_F(Launches, TheDriversErrorsKeepTheirNames) {
  fake::state().failures["cuLaunchKernelEx"] = 700;
  const Status status = enqueue("fwd bf16 h=2 q=64 k=64 d=64");
  EXPECT_EQ(status.code, Code::device);
  EXPECT_EQ(status.text,
            "cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS (700): a fake of what went wrong");
}

// A kernel that no other test launches: what is loaded once stays.
TEST_F(Launches, WhatCouldNotBeLoadedIsTriedAgain) {
  const char* const problem = "fwd f16 h=2 q=64 k=64 d=192/128 softcap=5";
  for (const char* call : {"cuLibraryLoadData", "cuLibraryGetKernel", "cuFuncSetAttribute"}) {
    fake::state().failures = {{call, 2}};
    EXPECT_EQ(enqueue(problem).code, Code::device) << call;
  }
  fake::state().failures.clear();
  EXPECT_EQ(fake::state().launches.size(), 0U);
  const int before = calls("cuLibraryLoadData");
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(enqueue(problem)) << i;
  EXPECT_EQ(fake::state().launches.size(), 2U);
  EXPECT_EQ(calls("cuLibraryLoadData"), before + 1);
}

// The planner makes none; a plan of a stray row must not become another kernel's launch.
TEST_F(Launches, ARowThatIsNotInTheCatalogIsRefused) {
  const Problem problem = problem_of("fwd bf16 h=2 q=64 k=64 d=64");
  const Result<Plan> planned = plan(problem, gpu_);
  ASSERT_TRUE(planned.ok());
  PlanData stray = planned->data();
  stray.kernel.block_n += 8;
  const Status status = cuda::run(stray, tensors_of(problem), nullptr, {});
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find("is not a row of the catalog"), std::string::npos) << status.text;
  EXPECT_TRUE(fake::state().launches.empty());
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
