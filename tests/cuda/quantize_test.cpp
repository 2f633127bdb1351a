// Quantising on a GPU: the kernel (cuda/aux/quantize.h), run on the host thread by thread, against
// literal loops; and what quantize() asks of a fake driver.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "archs.h"
#include "cuda/fake_code.h"
#include "cuda/fake_driver.h"
#include "cuda/quantize.h"
#include "cuda/quantize_host.h"
#include "quantized.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

using cuda::aux::Known;

template <Known kKnown>
void quantize_as(const cuda::aux::QuantizeParams& p, Dtype dtype) {
  host::launch(static_cast<unsigned>(p.blocks()), [&] {
    switch (dtype) {
      case Dtype::bf16: return cuda::aux::quantize<Dtype::bf16, kKnown>(p);
      case Dtype::f16: return cuda::aux::quantize<Dtype::f16, kKnown>(p);
      default: break;
    }
    if constexpr (kKnown != Known::plain) return cuda::aux::quantize<Dtype::f32, kKnown>(p);
    FAIL() << to_string(dtype);
  });
}

void quantize_as(Known known, const cuda::aux::QuantizeParams& p, Dtype dtype = Dtype::bf16) {
  switch (known) {
    case Known::nothing: return quantize_as<Known::nothing>(p, dtype);
    case Known::usual: return quantize_as<Known::usual>(p, dtype);
    case Known::plain: return quantize_as<Known::plain>(p, dtype);
  }
}

void quantize_on_host(const cuda::aux::QuantizeParams& p, Dtype dtype) {
  quantize_as(p.plain(dtype) ? Known::plain : p.usual() ? Known::usual : Known::nothing, p, dtype);
}

class QuantizeKernel : public testing::Test {
 protected:
  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

// What models have, what nothing is aligned of, blocks of few keys and of more than a block of
// threads keeps: all of it occurs.
TEST_F(QuantizeKernel, EveryBitIsThatOfTheLiteralLoops_S14) {
  constexpr const char* kWays[] = {"whole",   "whole pieces", "by elements", "direct",
                                   "by four", "2 lanes",      "4 lanes",     "8 lanes",
                                   "tiles",   "kept",         "made twice",  "heads side by side",
                                   "plain"};
  std::map<std::string, int> ways;
  const auto all_seen = [&] {
    return std::ranges::all_of(kWays, [&](const char* way) { return ways[way] > 0; });
  };
  constexpr int kLeast = kSanitized ? 12 : 40, kMost = kSanitized ? kLeast : 400;
  for (int trial = 0; trial < kLeast || (trial < kMost && !all_seen()); ++trial) {
    Quantized quantized(random_, true);
    quantized.clear();
    const Status refused = cuda::refusal(quantized.shape, quantized.tensors);
    ASSERT_TRUE(refused) << refused.text << "; " << quantized.text();
    cuda::aux::QuantizeParams p = cuda::quantize_params(quantized.shape, quantized.tensors);
    quantize_on_host(p, quantized.shape.dtype);
    if (p.plain(quantized.shape.dtype)) ++ways["plain"];
    quantized.check(quantized.text());
    if (HasFatalFailure()) break;
    for (const cuda::aux::QuantizedRows* rows : {&p.q(), &p.k(), &p.v()}) {
      if (rows->blocks == 0) continue;
      ++ways[rows->whole ? "whole" : "by elements"];
      if (rows->whole_pieces) ++ways["whole pieces"];
      if (!rows->tiles) ++ways[rows->direct ? "direct" : "by four"];
      ++ways[std::to_string(rows->lanes) + " lanes"];
      if (rows->tiles) ++ways["tiles"];
      if (rows->side > 1) ++ways["heads side by side"];
      if (rows->scales.by != Scaling::block || rows->tiles) continue;
      const int step = cuda::aux::kQuantizeThreads / rows->lanes;
      const bool kept = rows->direct && rows->scales.block <= cuda::aux::kKeptSteps * step;
      ++ways[kept ? "kept" : "made twice"];
    }
  }
  if (kSanitized) return;
  for (const char* way : kWays) EXPECT_GT(ways[way], 0) << way;
}

/// Two sequences of 40 queries of four heads and 150 keys of two, bf16, in tiles.
struct Dense {
  QuantizeShape shape;
  QuantizeTensors tensors;
  Elements q, k, v, q_out, k_out, v_out;
  std::vector<float> q_scale, k_scale, v_scale, signs, k_mean, shifts;

  explicit Dense(const char* words = "e4m3 scales=token/block:64/block:128 v_tiles")
      : q_scale(320, 0.5F),
        k_scale(12),
        v_scale(512, 0.1F),
        signs(128, -1.0F),
        k_mean(256, 0.5F),
        shifts(320) {
    shape.problem = *parse_problem(std::string("fwd b=2 h=4/2 q=40 k=150 d=128 ") + words);
    const Problem& p = shape.problem;
    shape.hadamard = 128;
    shape.signs = true;
    const auto tensor = [](Elements& elements, Dtype dtype, std::int64_t rows, std::int64_t heads) {
      elements = Elements(dtype, 2 * rows * heads * 128);
      for (std::int64_t i = 0; i < elements.count(); ++i) {
        elements.set(i, static_cast<double>(i % 37) - 18.0);
      }
      return Tensor{elements.data(), rows * heads * 128, heads * 128, 128};
    };
    tensors.q = tensor(q, Dtype::bf16, 40, 4);
    tensors.k = tensor(k, Dtype::bf16, 150, 2);
    tensors.v = tensor(v, Dtype::bf16, 150, 2);
    tensors.q_out = tensor(q_out, p.dtype, 40, 4);
    tensors.k_out = tensor(k_out, p.dtype, 150, 2);
    if (p.v_tiles) {
      v_out = Elements(Dtype::e4m3, 4 * p.value_tile_bytes());
      tensors.v_out = {v_out.data(), 2 * p.value_tile_bytes(), 0, p.value_tile_bytes()};
    } else {
      tensors.v_out = tensor(v_out, p.dtype, 150, 2);
    }
    for (Elements* out : {&q_out, &k_out, &v_out}) out->fill();
    tensors.q_scale = {q_scale.data(), 160, 40};
    tensors.k_scale = {k_scale.data(), 6, 3};
    tensors.v_scale = {v_scale.data(), 256, 128};
    tensors.signs = signs.data();
  }
  ~Dense() = default;
  void shift_keys() {
    shape.problem.scales.score_shift = true;
    tensors.k_mean = {k_mean.data(), 0, 128};
    tensors.score_shift = {shifts.data(), 160, 40};
  }
  Dense(const Dense&) = delete;
  Dense(Dense&&) = delete;
  Dense& operator=(Dense&&) = delete;
  Dense& operator=(const Dense&) = delete;
};

// A block of threads has eight rows of four heads, 64 keys of a head, or a tile.
TEST(QuantizeParams, WorkIsSharedOut) {
  Dense dense;
  cuda::aux::QuantizeParams p = cuda::quantize_params(dense.shape, dense.tensors);
  EXPECT_TRUE(p.q().whole && p.k().whole && p.v().whole);
  EXPECT_EQ(p.q().lanes, 4);
  EXPECT_EQ(p.q().side, 4);
  EXPECT_EQ(p.q().blocks, 2 * 5);
  EXPECT_EQ(p.k().side, 1);
  EXPECT_EQ(p.k().blocks, 2 * 2 * 3);
  EXPECT_EQ(p.v().blocks, 2 * 2 * 2);
  EXPECT_EQ(p.blocks(), 30);
  dense.tensors.k.stride_seqlen += 4;
  dense.tensors.q_out.data = static_cast<char*>(dense.tensors.q_out.data) + 4;
  cuda::aux::QuantizeParams other = cuda::quantize_params(dense.shape, dense.tensors);
  EXPECT_FALSE(other.q().whole || other.k().whole);
  EXPECT_TRUE(other.v().whole);
}

// What kernels of attention will want, with as many keys of a block as a block of threads keeps: by
// every kernel that takes them.
TEST(QuantizeBits, AreTheCpus_S14) {
  fake::state() = {};  // the tensors are the host's
  for (const std::string words :
       {"e4m3 scales=token/block:128/block:128 v_tiles", "e4m3 scales=token/block:120/block:256",
        "e4m3 scales=token/block:64/channel v_tiles", "i8 scales=head/block:150/block:64",
        "e4m3 scales=tensor/block:1000/tensor v_tiles"}) {
    for (const bool turned : {true, false}) {
      Dense dense(words.c_str());
      if (!turned) dense.shape.hadamard = 0;
      dense.shape.signs = turned;
      if (!turned) dense.tensors.signs = nullptr;
      const cuda::aux::QuantizeParams params = cuda::quantize_params(dense.shape, dense.tensors);
      EXPECT_EQ(params.usual(), words[0] == 'e') << words;
      EXPECT_EQ(params.plain(Dtype::bf16), params.usual()) << words;
      for (const Known known : {Known::nothing, Known::usual, Known::plain}) {
        if (known == Known::usual && !params.usual()) continue;
        if (known == Known::plain && !params.plain(Dtype::bf16)) continue;
        for (Elements* out : {&dense.q_out, &dense.k_out, &dense.v_out}) out->fill();
        quantize_as(known, params);
        const Elements q = dense.q_out, k = dense.k_out, v = dense.v_out;
        const std::vector<float> q_scale = dense.q_scale, k_scale = dense.k_scale;
        const std::vector<float> v_scale = dense.v_scale;
        for (Elements* out : {&dense.q_out, &dense.k_out, &dense.v_out}) out->fill();
        const Status status = quantize(dense.shape, dense.tensors, this_cpu());
        ASSERT_TRUE(status) << status.text;
        const std::string text = words + " known " + std::to_string(static_cast<int>(known));
        EXPECT_EQ(q, dense.q_out) << text;
        EXPECT_EQ(k, dense.k_out) << text;
        EXPECT_EQ(v, dense.v_out) << text;
        EXPECT_EQ(q_scale, dense.q_scale) << text;
        EXPECT_EQ(k_scale, dense.k_scale) << text;
        EXPECT_EQ(v_scale, dense.v_scale) << text;
      }
    }
  }
}

// It is launched to begin early: until the grids before it are done, no number is there.
TEST(QuantizeWaits, ForWhatIsEnqueuedBefore) {
  Dense dense;
  Elements q = dense.q;
  dense.q.fill();
  std::once_flag done;
  cuda::ptx::grids_before = [&] {
    std::call_once(done, [&] {
      for (std::int64_t i = 0; i < q.count(); ++i) dense.q.copy(i, q, i);
    });
  };
  quantize_on_host(cuda::quantize_params(dense.shape, dense.tensors), Dtype::bf16);
  cuda::ptx::grids_before = nullptr;
  for (std::int64_t i = 0; i < dense.q_out.count(); ++i) {
    ASSERT_TRUE(dense.q_out.at(i) == dense.q_out.at(i)) << i;
  }
}

// ---- the launch

using Enqueued = std::vector<std::pair<std::string, void*>>;

class QuantizeLaunch : public testing::Test {
 protected:
  void SetUp() override {
    fake::state() = {};
    if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
    for (Elements* elements :
         {&dense_.q, &dense_.k, &dense_.v, &dense_.q_out, &dense_.k_out, &dense_.v_out}) {
      place(elements->data(),
            static_cast<std::size_t>(elements->count() * elements->element_bytes()));
    }
    for (std::vector<float>* x : {&dense_.q_scale, &dense_.k_scale, &dense_.v_scale, &dense_.k_mean,
                                  &dense_.shifts, &dense_.signs}) {
      place(x->data(), x->size() * sizeof(float));
    }
  }

  static void place(const void* data, std::size_t bytes) {
    constexpr unsigned kDevice = 2;  // CUmemorytype
    fake::state().ranges.push_back({data, bytes, kDevice, false, 1});
  }

  cuda::FakeCode code_;
  Dense dense_;
};

// One launch and nothing else: it can be captured in a CUDA graph.
TEST_F(QuantizeLaunch, ItIsOneLaunchOnTheStreamOfTheTensorsDevice) {
  int stream = 0;
  Execution execution;
  execution.stream = &stream;
  const Status status = quantize(dense_.shape, dense_.tensors, execution);
  ASSERT_TRUE(status) << status.text;
  EXPECT_EQ(fake::state().enqueued, (Enqueued{{"cuLaunchKernelEx", &stream}}));
  EXPECT_EQ(fake::state().last.kernel, "quantize_plain_bf16");
  EXPECT_TRUE(fake::state().last.begins_early);
  EXPECT_EQ(fake::state().last.context, fake::context_of(1));
  EXPECT_EQ(fake::state().last.grid_x, 30U);
  EXPECT_EQ(fake::state().last.block_x, 128U);
  for (const char* waits : {"cuStreamSynchronize", "cuMemAlloc", "cuMemAllocAsync"}) {
    EXPECT_EQ(fake::state().calls[waits], 0) << waits;
  }
}

// Of keys that are shifted less is known; of rows that are not written by eights, nothing.
TEST_F(QuantizeLaunch, TheKernelIsThatOfTheRowsTypeAndOfWhatIsKnown) {
  for (const Known known : {Known::plain, Known::usual, Known::nothing}) {
    if (known == Known::usual) dense_.shift_keys();
    if (known == Known::nothing) dense_.tensors.q_out.stride_seqlen += 1;
    for (const auto& [dtype, name] :
         {std::pair{Dtype::f32, "f32"}, {Dtype::bf16, "bf16"}, {Dtype::f16, "f16"}}) {
      dense_.shape.dtype = dtype;
      const Status status = quantize(dense_.shape, dense_.tensors);
      ASSERT_TRUE(status) << status.text;
      const char* const kind = known == Known::nothing                        ? ""
                               : known == Known::usual || dtype == Dtype::f32 ? "usual_"
                                                                              : "plain_";
      EXPECT_EQ(fake::state().last.kernel, std::string("quantize_") + kind + name);
    }
  }
}

TEST_F(QuantizeLaunch, WithoutRowsNothingIsLaunched) {
  dense_.shape.problem.seqlen_q = dense_.shape.problem.seqlen_k = 0;
  ASSERT_TRUE(quantize(dense_.shape, dense_.tensors, *this_gpu(1)));
  EXPECT_TRUE(fake::state().enqueued.empty());
}

TEST_F(QuantizeLaunch, ATensorThatLiesElsewhereIsNamed) {
  fake::state().ranges.pop_back();
  EXPECT_EQ(quantize(dense_.shape, dense_.tensors).text,
            "signs: lies in host memory; quantize on gpu:1 takes its own and managed memory");
  const Status status = quantize(dense_.shape, dense_.tensors, this_cpu());
  EXPECT_EQ(status.code, Code::invalid);
  EXPECT_EQ(status.text.find("q: lies in memory of gpu:1; quantize on this CPU"), 0U)
      << status.text;
}

TEST_F(QuantizeLaunch, WhatTheDriverRefusesIsSaid) {
  fake::state().failures = {{"cuLaunchKernelEx", 700}};
  const Status status = quantize(dense_.shape, dense_.tensors);
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find("cuLaunchKernelEx"), std::string::npos) << status.text;
}

// What a CPU does and no GPU kernel.
TEST(QuantizeRefusal, SaysWhatGpusDoNot) {
  const auto text = [](QuantizeShape& shape, const QuantizeTensors& tensors) {
    const Status status = cuda::refusal(shape, tensors);
    EXPECT_EQ(status.code, Code::unsupported);
    return status.text;
  };
  Dense dense;
  Problem& p = dense.shape.problem;
  p.head_dim = 257;
  EXPECT_EQ(text(dense.shape, dense.tensors),
            "quantize: head_dim = 257: GPUs quantise rows of up to 256 columns");
  p.head_dim = 128;
  p.head_dim_v = 264;
  EXPECT_EQ(text(dense.shape, dense.tensors),
            "quantize: head_dim_v = 264: GPUs quantise rows of up to 256 columns");
  p.head_dim_v = 128;
  p.scales.block_v = 96;
  EXPECT_EQ(text(dense.shape, dense.tensors),
            "quantize: scales.block_v = 96: GPUs make v_tiles with blocks that divide 128 keys or "
            "are multiples of them");
  p.v_tiles = false;
  EXPECT_TRUE(cuda::refusal(dense.shape, dense.tensors));
}

}  // namespace
}  // namespace tessera
