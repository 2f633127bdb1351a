// The fixture of runs on a fake driver: no GPU is needed, none is used. Tests with it lie in
// several files.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "cuda/aux/backward_rows_params.h"
#include "cuda/fake_code.h"
#include "cuda/fake_driver.h"
#include "cuda/mma/backward_params.h"
#include "cuda/sm90/backward_params.h"
#include "tessera/tessera.hpp"

namespace tessera {

class Launches : public testing::Test {
 protected:
  void SetUp() override {
    fake::state() = {};
    if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
    const Result<Device> gpu = this_gpu();
    ASSERT_TRUE(gpu.ok()) << gpu.status().text;
    gpu_ = *gpu;
    ASSERT_TRUE(runs_here("sm90.forward.bf16.d128.128x128"));
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
    cuda::aux::BackwardRowParams prepare, finish_rows;
    cuda::aux::BackwardBiasParams begin, finish;
    cuda::sm90::FinishKeysParams finish_keys;
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
      if (launch.kernel.starts_with("finish_keys")) copy(seen.finish_keys);
      if (launch.kernel == "begin_bias") copy(seen.begin);
      if (launch.kernel == "finish_bias") copy(seen.finish);
    };
    seen.status = enqueue(problem, tensors);
    fake::state().on_launch = nullptr;
    return seen;
  }

  static int calls(const char* name) { return fake::state().calls[name]; }

  cuda::FakeCode code_;
  Device gpu_;
  alignas(4096) std::array<std::byte, std::size_t{9} * 4096> memory_ = {};
  std::array<std::int32_t, 4> offsets_ = {};
  std::array<float, 4> numbers_ = {};
  /// Never touched: only its address matters.
  alignas(Plan::workspace_alignment) std::array<std::byte, Plan::workspace_alignment> workspace_;
};

}  // namespace tessera
