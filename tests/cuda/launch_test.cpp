// What a run on a GPU asks of the driver, with a fake one. What a kernel computes is
// bench/gpu_check.py's business.
#include <array>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check/check.h"
#include "check/inputs.h"
#include "cuda/backend.h"
#include "cuda/driver.h"
#include "cuda/environment.h"
#include "cuda/launches.h"
#include "cuda/mma/decode_params.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/target.h"
#include "plan/plan.h"

namespace tessera {
namespace {

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
  fake::state().attributes = {{cuda::kComputeMajor, 7}, {cuda::kComputeMinor, 0}};
  const Result<Device> gpu = this_gpu();
  EXPECT_EQ(gpu.status().code, Code::device);
  EXPECT_NE(
      gpu.status().text.find("compute capability 7.0; the kernels are for Hopper, 9.0; Ampere "
                             "and newer, from 8.0 on"),
      std::string::npos)
      << gpu.status().text;
}

// What a device reports decides, not its name.
TEST_F(Launches, AGpuSinceAmpereIsPlannedForByWhatItReports) {
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 6}, {8, 9}, {10, 0}, {12, 1}}) {
    fake::state().attributes = {{cuda::kComputeMajor, major},
                                {cuda::kComputeMinor, minor},
                                {cuda::kMultiprocessorCount, 77},
                                {cuda::kSharedBytesOptin, 101376}};
    const Result<Device> gpu = this_gpu();
    ASSERT_TRUE(gpu) << gpu.status().text;
    EXPECT_EQ(gpu->arch, Arch::sm80);
    EXPECT_EQ(gpu->capability, 10 * major + minor);
    EXPECT_EQ(gpu->threads, 77);
    const Result<Plan> planned = plan(*parse_problem("fwd f16 h=2 q=900 k=900 d=128"), *gpu);
    ASSERT_TRUE(planned) << planned.status().text;
    EXPECT_EQ(planned->kernel(), "sm80.forward.f16.d128.128x64.w8") << "with 99 KB a block";
  }
}

TEST_F(Launches, AGpuMayBePlannedForAsAnother) {
  cuda::Environment environment;
  environment.set("TESSERA_GPU_AS", "a10");
  const Result<Device> gpu = this_gpu(1);
  ASSERT_TRUE(gpu) << gpu.status().text;
  EXPECT_EQ(gpu->name, "a10 (Fake H200)");
  EXPECT_EQ(gpu->arch, Arch::sm80);
  EXPECT_EQ(gpu->threads, 132) << "the device's own";
  EXPECT_EQ(gpu->l1_bytes, 101376);
  EXPECT_EQ(gpu->capability, 90);
  EXPECT_EQ(gpu->ordinal, 1);
  environment.set("TESSERA_GPU_AS", "a11");
  EXPECT_NE(this_gpu().status().text.find(
                "TESSERA_GPU_AS = 'a11': unknown; known: t4, rtx-2080-ti, a100, a10,"),
            std::string::npos);
  environment.set("TESSERA_GPU_AS", "zen4-16");
  EXPECT_EQ(this_gpu().status().code, Code::device);
  fake::state().attributes = {{cuda::kComputeMajor, 8}};
  environment.set("TESSERA_GPU_AS", "h200");
  EXPECT_NE(this_gpu().status().text.find("does not run kernels of sm90"), std::string::npos);
}

// As many blocks as multiprocessors have at once, by registers and by shared memory.
TEST_F(Launches, MmaSyncHasSeveralBlocksAMultiprocessor) {
  cuda::Environment environment;
  environment.set("TESSERA_GPU_AS", "a100");
  gpu_ = *this_gpu(1);
  ASSERT_TRUE(enqueue("fwd bf16 b=9 h=99 q=300 k=300 d=64"));
  EXPECT_EQ(fake::state().last.kernel, "tessera_sm80_forward_bf16_d64_128x64_w4");
  EXPECT_EQ(fake::state().last.grid_x, 264U);
  EXPECT_EQ(fake::state().last.block_x, 128U);
  ASSERT_TRUE(enqueue("fwd bf16 b=9 h=99 q=300 k=300 d=256"));
  EXPECT_EQ(fake::state().last.kernel, "tessera_sm80_forward_bf16_d256_128x64_w4x2");
  EXPECT_EQ(fake::state().last.grid_x, 132U);
  EXPECT_EQ(fake::state().last.block_x, 256U);
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
      {"fwd bf16 h=8 q=4096 k=4096 d=64", {64, 192, 1, 1}, {64, 128, 1, 1}},
      {"fwd bf16 h=8 q=4096 k=4096 d=128", {64, 192, 1, 1}, {64, 80, 1, 1}},
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

/// What a decoding kernel is launched with, and with what plan.
struct DecodeLaunch {
  PlanData plan;
  cuda::mma::DecodeParams params;
};

class DecodeLaunches : public Launches {
 protected:
  DecodeLaunch watch_decode(const Problem& problem, const Tensors& tensors) {
    DecodeLaunch seen;
    const Result<Plan> planned = plan(problem, gpu_);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    if (!planned) return seen;
    seen.plan = planned->data();
    fake::state().on_launch = [&seen](const fake::Launch&, const void* parameters) {
      seen.params = *static_cast<const cuda::mma::DecodeParams*>(parameters);
    };
    const Status status = enqueue(problem, tensors);
    EXPECT_TRUE(status) << status.text;
    fake::state().on_launch = nullptr;
    return seen;
  }
  /// Where a region of the plan's workspace lies; null: it has none of the name.
  const void* region(const PlanData& plan, const char* name) const {
    for (const WorkspaceRegion& region : plan.regions) {
      if (region.name == name) return workspace_.data() + region.offset;
    }
    return nullptr;
  }
};

// A row that decodes is one launch of a block for every span, which leave each other parts in the
// plan's workspace.
TEST_F(DecodeLaunches, SpansAreBlocksOfOneLaunch) {
  const Problem problem = problem_of("fwd bf16 b=2 h=6/2 q=2 k=9000 d=64 sink");
  Tensors tensors = tensors_of(problem);
  tensors.softmax_lse = numbers_.data();
  const auto [plan, p] = watch_decode(problem, tensors);
  EXPECT_EQ(launched(), "tessera_sm90_forward_decode_bf16_d64_16x64 384\n");
  EXPECT_EQ(p.spans, plan.spans);
  EXPECT_EQ(p.spans.count, 384);
  EXPECT_EQ(p.span_count.value(), 384);
  EXPECT_EQ(p.unit_tiles.value(), 4);
  EXPECT_EQ(p.parts.words, region(plan, "part_words"));
  EXPECT_NE(p.parts.words, nullptr);
  EXPECT_FALSE(p.parts.by_unit);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads, 2);
  EXPECT_EQ(p.num_heads, 6);
  EXPECT_EQ(p.group.value(), 3);
  EXPECT_EQ(p.sink, tensors.sink);
  EXPECT_EQ(p.o, tensors.o.data);
  EXPECT_EQ(p.softmax_lse, tensors.softmax_lse);
  EXPECT_EQ(p.lse_head, problem.seqlen_q);
  EXPECT_FALSE(p.cache.used);
  EXPECT_FALSE(p.looks_ahead);
  EXPECT_EQ(p.mask, core::MaskRules{});
}

// Its kernel waits for what was enqueued before it, others of 16 bits do not.
TEST_F(DecodeLaunches, BeginEarly) {
  EXPECT_TRUE(enqueue("fwd bf16 b=2 h=6/2 q=2 k=9000 d=64"));
  EXPECT_TRUE(fake::state().last.begins_early);
  EXPECT_TRUE(enqueue("fwd bf16 b=2 h=6 q=200 k=9000 d=64"));
  EXPECT_FALSE(fake::state().last.begins_early);
}

// What another run has left in the workspace must not be taken for a part.
TEST_F(DecodeLaunches, EveryRunHasATicketOfItsOwn) {
  const Problem problem = problem_of("fwd bf16 b=2 h=6/2 q=2 k=9000 d=64");
  std::set<std::uint32_t> tickets;
  for (int i = 0; i < 10; ++i) {
    tickets.insert(watch_decode(problem, tensors_of(problem)).params.parts.ticket);
  }
  EXPECT_EQ(tickets.size(), 10U);
  EXPECT_EQ(tickets.count(0), 0U);
}

// With batch_invariant every unit is a part and has a slot.
TEST_F(DecodeLaunches, PartsAreUnitsWhereBitsMustNotDependOnTheBatch_S9) {
  const Problem problem = problem_of("fwd bf16 b=2 h=6/2 q=2 k=9000 d=64 batch_invariant");
  const auto [plan, p] = watch_decode(problem, tensors_of(problem));
  EXPECT_EQ(launched(), "tessera_sm90_forward_decode_bf16_d64_16x64 72\n");
  EXPECT_TRUE(p.parts.by_unit);
  EXPECT_EQ(p.parts.units, 18);
  EXPECT_EQ(p.unit_tiles.value(), 32);
  EXPECT_EQ(p.parts.words, region(plan, "part_words"));
}

// Where an item is one unit there is no other part, and no memory for one.
TEST_F(DecodeLaunches, OneUnitNeedsNoWorkspace) {
  const Problem problem = problem_of("fwd bf16 b=2 h=6/2 q=2 k=60 d=64");
  const auto [plan, p] = watch_decode(problem, tensors_of(problem));
  EXPECT_EQ(launched(), "tessera_sm90_forward_decode_bf16_d64_16x64 4\n");
  EXPECT_EQ(plan.workspace_bytes, 0U);
}

// Lengths, pages and masks are read where the kernel runs: it is told where they lie.
TEST_F(DecodeLaunches, TheKernelIsToldOfCacheAndMask_S3_S13) {
  const Problem problem = problem_of(
      "fwd f16 b=2 h=6/2 q=2 k=9000 d=128 cache=before:2 pages=900x16:i64 rows=5 leftpad "
      "window=300,0 align=tl chunk=512 sink_tokens=4 tree");
  Tensors tensors = tensors_of(problem);
  std::array<std::int32_t, 2> seqlens = {}, index = {}, leftpad = {};
  std::array<std::int64_t, 1> pages = {};
  std::array<std::uint64_t, 4> tree = {};
  tensors.cache.seqlens = seqlens.data();
  tensors.cache.index = index.data();
  tensors.cache.leftpad = leftpad.data();
  tensors.cache.page_table = pages.data();
  tensors.cache.stride_page_table = 570;
  tensors.tree_mask = tree.data();
  const cuda::mma::DecodeParams p = watch_decode(problem, tensors).params;
  EXPECT_EQ(launched(), "tessera_sm90_forward_decode_f16_d128_16x64 256\n");
  EXPECT_TRUE(p.cache.used);
  EXPECT_EQ(p.cache.seqlens, seqlens.data());
  EXPECT_EQ(p.cache.seqlen_new, 2);
  EXPECT_EQ(p.cache.cu_seqlens_new, nullptr);
  EXPECT_EQ(p.cache.index, index.data());
  EXPECT_EQ(p.cache.rows, 5);
  EXPECT_EQ(p.cache.leftpad, leftpad.data());
  EXPECT_EQ(p.cache.capacity, 9000);
  EXPECT_EQ(p.cache.pages, (core::Pages{pages.data(), 570, 900, 16, PageIds::i64}));
  EXPECT_EQ(p.mask,
            (core::MaskRules{{300, 0, Alignment::top_left}, core::Divisor(512), 4, tree.data()}));
  EXPECT_EQ(p.k.data, tensors.k.data);
  EXPECT_EQ(p.k.strides.batch, tensors.k.stride_batch);
  EXPECT_EQ(p.v.strides.seqlen, tensors.v.stride_seqlen);
  EXPECT_EQ(p.sequences, sequences_of(problem, tensors));
  EXPECT_TRUE(p.looks_ahead);
}

// Numbers that memory does not hold yet could place packed queries and keys anywhere.
TEST_F(DecodeLaunches, NobodyLooksAheadOfPackedSequences_S11) {
  const Problem problem = problem_of("fwd bf16 b=2 h=6/2 q=2 k=900 d=64 cache=after packed=3");
  Tensors tensors = tensors_of(problem);
  const std::array<std::int32_t, 3> cu_seqlens = {0, 1, 3};
  const std::array<std::int32_t, 2> seqlens = {};
  tensors.cu_seqlens_q = cu_seqlens.data();
  tensors.cu_seqlens_k = nullptr;
  tensors.cache.seqlens = seqlens.data();
  EXPECT_FALSE(watch_decode(problem, tensors).params.looks_ahead);
}

/// What a forward kernel of tiles is launched with.
cuda::sm90::ForwardParams watch_forward(const std::function<Status()>& enqueue) {
  cuda::sm90::ForwardParams seen;
  fake::state().on_launch = [&seen](const fake::Launch&, const void* parameters) {
    seen = *static_cast<const cuda::sm90::ForwardParams*>(parameters);
  };
  const Status status = enqueue();
  EXPECT_TRUE(status) << status.text;
  fake::state().on_launch = nullptr;
  return seen;
}

// Prefill: the same of tiles of query rows. A box lies in one page, and fills no more of a buffer
// than divides it; threads copy rows where it would have fewer than 4 keys. Without pages it is a
// block.
TEST_F(Launches, TilesAreToldOfTheirCache_S13) {
  const Problem problem = problem_of(
      "fwd f16 b=2 h=6/2 q=600 k=9000 d=128 cache=before:2 pages=900x48:i64 rows=5 window=300,0");
  Tensors tensors = tensors_of(problem);
  std::array<std::int32_t, 2> seqlens = {}, index = {};
  std::array<std::int64_t, 1> pages = {};
  tensors.cache.seqlens = seqlens.data();
  tensors.cache.index = index.data();
  tensors.cache.page_table = pages.data();
  tensors.cache.stride_page_table = 190;
  const auto p = watch_forward([&] { return enqueue(problem, tensors); });
  EXPECT_EQ(fake::state().last.kernel, "tessera_sm90_forward_f16_d128_128x128");
  EXPECT_TRUE(p.cache.used);
  EXPECT_EQ(p.cache.seqlens, seqlens.data());
  EXPECT_EQ(p.cache.seqlen_new, 2);
  EXPECT_EQ(p.cache.index, index.data());
  EXPECT_EQ(p.cache.rows, 5);
  EXPECT_EQ(p.cache.capacity, 9000);
  EXPECT_EQ(p.cache.pages, (core::Pages{pages.data(), 190, 900, 48, PageIds::i64}));
  EXPECT_EQ(p.page_size.value(), 48);
  EXPECT_EQ(p.box_keys, 16);
  EXPECT_TRUE(p.strangers);
  EXPECT_EQ(p.window, (core::Window{300, 0, Alignment::bottom_right}));
}

TEST_F(Launches, BoxesOfPagesDivideThem_S13) {
  using Box = std::array<unsigned, 4>;
  const struct {
    const char* words;
    unsigned keys;
    int box_keys;  ///< 0: keys do not lie in pages
  } cases[] = {{"cache=after", 128, 0},
               {"cache=full rows=3 leftpad", 128, 0},
               {"cache=after pages=900x1024", 128, 128},
               {"cache=after pages=900x16", 16, 16},
               {"cache=after pages=900x40", 8, 8},
               {"cache=after pages=900x100", 4, 4},
               {"cache=after pages=900x6", 1, 1},
               {"cache=after pages=9000x1", 1, 1},
               {"cache=after pages=900x3", 1, 1},
               {"cache=after pages=900x256 leftpad", 1, 1}};
  int sequences = 2;  // maps of the same tensors are made once
  for (const auto& [words, keys, box_keys] : cases) {
    const Problem problem = problem_of(
        ("fwd bf16 b=" + std::to_string(sequences++) + " h=2 q=512 k=1024 d=128 causal " + words)
            .c_str());
    Tensors tensors = tensors_of(problem);
    std::array<std::int32_t, 16> seqlens = {}, index = {}, leftpad = {}, pages = {};
    if (problem.cache->lengths != Lengths::full) tensors.cache.seqlens = seqlens.data();
    if (problem.cache->rows > 0) tensors.cache.index = index.data();
    if (problem.cache->leftpad) tensors.cache.leftpad = leftpad.data();
    if (problem.cache->paged()) tensors.cache.page_table = pages.data();
    tensors.cache.stride_page_table = problem.cache->paged() ? 1024 : 0;
    fake::state().boxes.clear();
    const auto p = watch_forward([&] { return enqueue(problem, tensors); });
    EXPECT_EQ(fake::state().last.kernel, "tessera_sm90_forward_bf16_d128_128x128") << words;
    const Box box = {64, keys, 1, 1};
    ASSERT_EQ(fake::state().boxes.size(), 3U) << words;
    EXPECT_EQ(fake::state().boxes[1], box) << words;
    EXPECT_EQ(fake::state().boxes[2], box) << words;
    EXPECT_EQ(p.box_keys, box_keys) << words;
    EXPECT_TRUE(p.strangers) << words;
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

TEST_F(Launches, AfterAFailedLaunchThereIsNoOther) {
  fake::state().failures["cuLaunchKernelEx"] = 700;
  EXPECT_EQ(enqueue("bwd bf16 h=2 q=64 k=64 d=64").code, Code::device);
  EXPECT_EQ(calls("cuLaunchKernelEx"), 1);
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

// What the GPU reaches is measured with its own architecture's program: products on every
// multiprocessor, then reads.
TEST_F(Launches, PeaksAreMeasuredOnTheYardstick) {
  const cuda::Yardstick& yardstick = cuda::target_of(gpu_.arch)->architecture->yardstick;
  const Result<Peaks> peaks = measure_peaks(gpu_, 0.0);
  ASSERT_TRUE(peaks.ok()) << peaks.status().text;
  EXPECT_GT(peaks->bf16_flops, 0.0);
  EXPECT_GT(peaks->read_bytes, 0.0);
  const std::vector<fake::Launch>& all = fake::state().launches;
  ASSERT_EQ(all.size(), 20U);  // a burst each
  EXPECT_EQ(all.front().kernel, "multiply_peak");
  EXPECT_EQ(all.front().grid_x, 132U);
  EXPECT_EQ(static_cast<int>(all.front().shared_bytes), yardstick.shared_bytes);
  EXPECT_EQ(all.back().kernel, "read_peak");
  EXPECT_EQ(all.back().grid_x, 8U * 132U);
  EXPECT_EQ(all.back().shared_bytes, 0U);
  for (const fake::Launch& launch : all) {
    EXPECT_EQ(static_cast<int>(launch.block_x), yardstick.threads);
  }
  EXPECT_EQ(calls("cuMemAlloc"), calls("cuMemFree"));
  Device other = gpu_;
  other.arch = Arch::avx2;
  EXPECT_EQ(cuda::measure_peaks(other, 0.0).status().code, Code::device);
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
