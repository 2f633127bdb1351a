// Appending to a cache on a GPU: the kernel (cuda/aux/append.h), run on the host thread by thread,
// against literal loops; and what append() asks of a fake driver.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "appended.h"
#include "archs.h"
#include "cuda/append.h"
#include "cuda/append_host.h"
#include "cuda/fake_code.h"
#include "cuda/fake_driver.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

template <Dtype kType>
void append_as(const cuda::aux::AppendParams& p) {
  is_scaled(p.dtype_kv) ? cuda::aux::append_quantizing<kType>(p) : cuda::aux::append<kType>(p);
}

void append_on_host(const cuda::aux::AppendParams& p, Dtype dtype) {
  host::launch(static_cast<unsigned>(p.blocks()), [&] {
    switch (dtype) {
      case Dtype::f32: return append_as<Dtype::f32>(p);
      case Dtype::bf16: return append_as<Dtype::bf16>(p);
      case Dtype::f16: return append_as<Dtype::f16>(p);
      default: FAIL() << to_string(dtype);
    }
  });
}

class AppendKernel : public testing::Test {
 protected:
  /// How often tensors were carried in which way.
  using Ways = std::map<std::string, int>;

  Ways check(Appended::Kind kind, int trials) {
    Ways ways;
    for (int trial = 0; trial < trials; ++trial) {
      Appended appended(random_, kind);
      appended.clear();
      const cuda::aux::AppendParams p = cuda::append_params(appended.shape, appended.tensors);
      append_on_host(p, appended.shape.dtype);
      appended.check(appended.text());
      if (HasFatalFailure()) break;
      for (const cuda::aux::CarriedRows* rows : {&p.k, &p.v, &p.q}) {
        if (rows->rows == 0) continue;
        ++ways[std::to_string(rows->piece_bytes) + " bytes"];
        if (rows->written == nullptr) continue;
        const int threads = rows->head_units.value();
        ++ways[threads > 32 ? "several warps compare" : threads > 1 ? "lanes compare" : "alone"];
        const bool idle = rows->rotated_units + rows->plain_units < threads;
        if (idle) ++ways["idle lanes"];
        if (rows->row_blocks.value() > 1) ++ways["several blocks a row"];
      }
    }
    return ways;
  }

  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

constexpr int kTrials = kSanitized ? 40 : 120;

TEST_F(AppendKernel, EveryRowGoesWhereItBelongs_S13) {
  Ways ways = check(Appended::Kind::any, kTrials);
  for (const char* way : {"2 bytes", "4 bytes", "8 bytes", "16 bytes"}) {
    EXPECT_GT(ways[way], kTrials / 40) << way;
  }
  for (const char* way : {"lanes compare", "idle lanes"}) EXPECT_GT(ways[way], 0) << way;
}

// A maximum among more threads than a warp has goes by shared memory, and no head is cut by blocks.
TEST_F(AppendKernel, WideRowsAreRoundedByTheirOwnMaximum_S14) {
  Ways ways = check(Appended::Kind::wide, kTrials / 4);
  for (const char* way : {"several warps compare", "several blocks a row"}) {
    EXPECT_GT(ways[way], 0) << way;
  }
}

// Nothing outside the cache is touched, and no page or row that does not exist is looked for.
TEST_F(AppendKernel, WhatDoesNotExistIsPassedOver_S13) { check(Appended::Kind::wild, kTrials); }

/// Two sequences, all dense and contiguous; the cache has 9 slots.
struct Dense {
  AppendShape shape;
  AppendTensors tensors;
  Elements k, v, k_new, v_new, q, tables;
  std::int32_t seqlens[2] = {5, 0};

  Dense(Dtype dtype, std::int64_t heads, std::int64_t dim, std::int64_t rotary_dim) {
    shape.dtype = dtype;
    shape.batch = 2;
    shape.num_heads = shape.num_heads_k = heads;
    shape.seqlen_q = 3;
    shape.seqlen_k = 9;
    shape.head_dim = shape.head_dim_v = dim;
    shape.cache.lengths = Lengths::before;
    shape.cache.seqlen_new = 3;
    shape.rotary = RotaryShape{.dim = rotary_dim, .positions = 16, .dtype = Dtype::f32};
    const auto rows = [&](Elements& memory, std::int64_t seqlen) {
      memory = Elements(dtype, 2 * seqlen * heads * dim);
      if (seqlen < 9) {
        for (std::int64_t i = 0; i < memory.count(); ++i) memory.set(i, 1.0);
      }
      return Tensor{memory.data(), seqlen * heads * dim, heads * dim, dim};
    };
    tensors.k = rows(k, 9);
    tensors.v = rows(v, 9);
    tensors.k_new = rows(k_new, 3);
    tensors.v_new = rows(v_new, 3);
    tensors.q = tensors.q_out = rows(q, 3);
    tables = Elements(Dtype::f32, 16 * rotary_dim / 2);
    for (std::int64_t i = 0; i < tables.count(); ++i) tables.set(i, 0.25);
    tensors.cache.seqlens = seqlens;
    tensors.rotary = {tables.data(), tables.data(), rotary_dim / 2, rotary_dim / 2};
  }
  ~Dense() = default;
  Dense(const Dense&) = delete;
  Dense(Dense&&) = delete;
  Dense& operator=(Dense&&) = delete;
  Dense& operator=(const Dense&) = delete;
};

// What models have goes by 16 bytes; one start, stride or half that is no multiple of those makes
// the pieces shorter.
TEST(AppendParams, PiecesAreTheLongestThatRowsConsistOf) {
  using Bytes = std::vector<int>;
  const auto bytes = [](const Dense& dense) {
    const cuda::aux::AppendParams p = cuda::append_params(dense.shape, dense.tensors);
    return Bytes{p.k.piece_bytes, p.v.piece_bytes, p.q.piece_bytes};
  };
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    Dense dense(dtype, 2, 128, 128);
    EXPECT_EQ(bytes(dense), (Bytes{16, 16, 16}));
    const int size = static_cast<int>(size_of(dtype));
    dense.tensors.k.stride_seqlen += 1;
    dense.tensors.v_new.data = static_cast<const char*>(dense.tensors.v_new.data) + 8;
    EXPECT_EQ(bytes(dense), (Bytes{size, 8, 16}));
    // Tables in fp32: two entries for half a piece of 8 bytes of 16-bit types, one of fp32.
    dense.tensors.rotary.stride_sin += 2;
    EXPECT_EQ(bytes(dense), (Bytes{size, 8, size == 4 ? 16 : 8}));
    dense.tensors.rotary.stride_sin += 1;
    EXPECT_EQ(bytes(dense), (Bytes{size, 8, size == 4 ? 8 : 4}));
  }
  EXPECT_EQ(bytes(Dense(Dtype::bf16, 2, 64, 48)), (Bytes{16, 16, 16}));
  // Halves of 12 columns, and of 50 in rows of 100.
  EXPECT_EQ(bytes(Dense(Dtype::bf16, 2, 64, 24)), (Bytes{8, 16, 8}));
  EXPECT_EQ(bytes(Dense(Dtype::bf16, 2, 100, 100)), (Bytes{4, 8, 4}));
  EXPECT_EQ(bytes(Dense(Dtype::bf16, 2, 33, 2)), (Bytes{2, 2, 2}));
  Dense interleaved(Dtype::bf16, 2, 64, 24);
  interleaved.shape.rotary->interleaved = true;
  EXPECT_EQ(bytes(interleaved), (Bytes{16, 16, 16}));
}

// Queries in place: columns that are not rotated are not moved. A strided dimension of one element
// is none.
TEST(AppendParams, NothingIsCarriedInVain) {
  Dense dense(Dtype::bf16, 4, 64, 32);
  cuda::aux::AppendParams p = cuda::append_params(dense.shape, dense.tensors);
  EXPECT_EQ(p.k.head_units.value(), 4);
  EXPECT_EQ(p.q.head_units.value(), 2);
  EXPECT_EQ(p.blocks(),
            3);  // 2 sequences of 3 rows of no more than 4 units, each a thread's for all heads
  dense.shape.batch = 1;
  dense.tensors.k.stride_batch = 1;
  p = cuda::append_params(dense.shape, dense.tensors);
  EXPECT_EQ(p.k.piece_bytes, 16);
  dense.shape.num_heads = 0;
  dense.shape.cache.seqlen_new = 0;
  EXPECT_EQ(cuda::append_params(dense.shape, dense.tensors).blocks(), 0);
}

// A block's threads compare the numbers of a head: of rows that are copied there may be any.
TEST(AppendRefusal, SaysWhatGpusDoNot) {
  Dense dense(Dtype::bf16, 2, 64, 32);
  dense.shape.head_dim = 257;
  EXPECT_TRUE(cuda::refusal(dense.shape));
  dense.shape.dtype_kv = Dtype::i8;
  EXPECT_EQ(cuda::refusal(dense.shape).text,
            "append: head_dim = 257: GPUs quantise rows of up to 256 columns");
  EXPECT_EQ(cuda::refusal(dense.shape).code, Code::unsupported);
  std::swap(dense.shape.head_dim, dense.shape.head_dim_v);
  EXPECT_EQ(cuda::refusal(dense.shape).text,
            "append: head_dim_v = 257: GPUs quantise rows of up to 256 columns");
  dense.shape.head_dim_v = 256;
  EXPECT_TRUE(cuda::refusal(dense.shape));
  dense.shape.head_dim_v = 257;
  dense.shape.cache.seqlen_new = 0;
  EXPECT_TRUE(cuda::refusal(dense.shape));
}

// It is launched to begin early: until the grids before it are done, no length is there.
TEST(AppendWaits, ForWhatIsEnqueuedBefore) {
  Dense dense(Dtype::bf16, 4, 64, 32);
  std::fill_n(dense.seqlens, 2, -1);
  std::once_flag done;
  cuda::ptx::grids_before = [&] {
    std::call_once(done, [&] {
      dense.seqlens[0] = 5;
      dense.seqlens[1] = 0;
    });
  };
  append_on_host(cuda::append_params(dense.shape, dense.tensors), Dtype::bf16);
  cuda::ptx::grids_before = nullptr;
  for (std::int64_t i = 0; i < dense.k.count(); ++i) {
    const std::int64_t slot = i / 256;  // of both: the first sequence's 5 to 7, the second's 0 to 2
    ASSERT_EQ(dense.k.untouched(i), slot < 5 || slot == 8 || slot >= 12) << i;
    ASSERT_EQ(dense.v.untouched(i), slot < 5 || slot == 8 || slot >= 12) << i;
  }
}

// ---- the launch

using Enqueued = std::vector<std::pair<std::string, void*>>;

class AppendLaunch : public testing::Test {
 protected:
  void SetUp() override {
    fake::state() = {};
    if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
    for (const Elements* elements :
         {&dense_.k_new, &dense_.v_new, &dense_.q, &dense_.tables, &dense_.k, &dense_.v}) {
      place(const_cast<Elements*>(elements)->data(),
            static_cast<std::size_t>(elements->count() * elements->element_bytes()));
    }
    place(dense_.seqlens, sizeof dense_.seqlens);
  }

  /// What is freed here and taken elsewhere is the host's again.
  void TearDown() override { fake::state() = {}; }

  static void place(const void* data, std::size_t bytes) {
    constexpr unsigned kDevice = 2;  // CUmemorytype
    fake::state().ranges.push_back({data, bytes, kDevice, false, 1});
  }

  cuda::FakeCode code_;
  Dense dense_{Dtype::bf16, 4, 128, 64};
};

// One launch and nothing else: it can be captured in a CUDA graph. Lengths are not looked at: these
// are too long.
TEST_F(AppendLaunch, ItIsOneLaunchOnTheStreamOfTheCachesDevice) {
  dense_.seqlens[0] = 100;
  int stream = 0;
  Execution execution;
  execution.stream = &stream;
  fake::state().on_launch = [&](const fake::Launch&, const void* parameters) {
    append_on_host(*static_cast<const cuda::aux::AppendParams*>(parameters), Dtype::bf16);
  };
  const Status status = append(dense_.shape, dense_.tensors, execution);
  fake::state().on_launch = nullptr;
  ASSERT_TRUE(status) << status.text;
  EXPECT_EQ(fake::state().enqueued, (Enqueued{{"cuLaunchKernelEx", &stream}}));
  EXPECT_EQ(fake::state().last.kernel, "append_bf16");
  EXPECT_TRUE(fake::state().last.begins_early);
  EXPECT_EQ(fake::state().last.context, fake::context_of(1));
  // 6 rows of 8 units of 4 heads are a block's; so are in-place queries.
  EXPECT_EQ(fake::state().last.grid_x, 3U);
  EXPECT_EQ(fake::state().last.block_x, 128U);
  for (const char* waits : {"cuStreamSynchronize", "cuMemAlloc", "cuMemAllocAsync"}) {
    EXPECT_EQ(fake::state().calls[waits], 0) << waits;
  }
  for (std::int64_t i = 0; i < dense_.k.count(); ++i) {
    const std::int64_t slot = i / 512;  // of both: the second sequence's first three
    ASSERT_EQ(dense_.k.untouched(i), slot < 9 || slot >= 12) << i;
    ASSERT_EQ(dense_.v.untouched(i), slot < 9 || slot >= 12) << i;
  }
}

TEST_F(AppendLaunch, TheKernelIsThatOfTheRowsType) {
  for (const auto& [dtype, name] : {std::pair{Dtype::f32, "append_f32"},
                                    {Dtype::bf16, "append_bf16"},
                                    {Dtype::f16, "append_f16"}}) {
    dense_.shape.dtype = dtype;
    const Status status = append(dense_.shape, dense_.tensors);
    ASSERT_TRUE(status) << status.text;
    EXPECT_EQ(fake::state().last.kernel, name);
  }
}

TEST_F(AppendLaunch, ACacheOf8BitsHasAKernelOfItsOwn) {
  dense_.shape.dtype_kv = Dtype::e4m3;
  dense_.shape.scale_k = dense_.shape.scale_v = Scaling::token;
  std::vector<float> scales(72);
  place(scales.data(), scales.size() * sizeof(float));
  dense_.tensors.k_scale = dense_.tensors.v_scale = {scales.data(), 36, 1, 4};
  for (const auto& [dtype, name] : {std::pair{Dtype::f32, "append_quantizing_f32"},
                                    {Dtype::bf16, "append_quantizing_bf16"},
                                    {Dtype::f16, "append_quantizing_f16"}}) {
    dense_.shape.dtype = dtype;
    fake::state().enqueued.clear();
    const Status status = append(dense_.shape, dense_.tensors);
    ASSERT_TRUE(status) << status.text;
    EXPECT_EQ(fake::state().last.kernel, name);
    EXPECT_TRUE(fake::state().last.begins_early);
    EXPECT_EQ(fake::state().enqueued.size(), 1U);
  }
  fake::state().ranges.pop_back();
  EXPECT_EQ(append(dense_.shape, dense_.tensors).text,
            "k_scale: lies in host memory; append on gpu:1 takes its own and managed memory");
}

TEST_F(AppendLaunch, WithoutRowsNothingIsLaunched) {
  dense_.shape.cache.seqlen_new = dense_.shape.seqlen_q = 0;
  ASSERT_TRUE(append(dense_.shape, dense_.tensors, *this_gpu(1)));
  EXPECT_TRUE(fake::state().enqueued.empty());
}

TEST_F(AppendLaunch, MoreRowsThanALaunchTakesAreRefused) {
  dense_.shape.batch = dense_.shape.seqlen_q = std::int64_t{1} << 20;
  const Status status = append(dense_.shape, dense_.tensors);
  EXPECT_EQ(status.code, Code::device);
  EXPECT_EQ(status.text,
            "append: 1099511627776 rows or blocks of threads; up to 2147483519 are one launch");
  EXPECT_TRUE(fake::state().enqueued.empty());
}

TEST_F(AppendLaunch, ATensorThatLiesElsewhereIsNamed) {
  fake::state().ranges.pop_back();
  EXPECT_EQ(append(dense_.shape, dense_.tensors).text,
            "cache.seqlens: lies in host memory; append on gpu:1 takes its own and managed memory");
  const Status status = append(dense_.shape, dense_.tensors, this_cpu());
  EXPECT_EQ(status.code, Code::invalid);
  EXPECT_EQ(status.text.find("k: lies in memory of gpu:1; append on this CPU"), 0U) << status.text;
}

TEST_F(AppendLaunch, WhatTheDriverRefusesIsSaid) {
  fake::state().failures = {{"cuLaunchKernelEx", 700}};
  const Status status = append(dense_.shape, dense_.tensors);
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find("cuLaunchKernelEx"), std::string::npos) << status.text;
}

}  // namespace
}  // namespace tessera
