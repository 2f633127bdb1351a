// What a backward on a GPU asks of the driver: its kernels, one after another, and what they are
// launched with.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "cuda/backend.h"
#include "cuda/environment.h"
#include "cuda/launches.h"
#include "plan/plan.h"

namespace tessera {
namespace {

// A block for every row block and head before; then one a block of keys and key/value head, at most
// one a multiprocessor. These finish dQ themselves. Few blocks of keys are shared.
TEST_F(Launches, ABackwardIsPrepared) {
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=6/3 q=200 k=300 d=128 causal batch_invariant"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 48\n"  // four blocks of 64 rows
            "tessera_sm90_backward_bf16_d128_64x128 18\n");
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=6/3 q=200 k=300 d=128 causal"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 48\n"
            "tessera_sm90_backward_bf16_d128_64x128 72\n"  // four pieces each
            "finish_keys_bf16 144\n");                     // eight of 64 keys x 64 columns each
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
            "prepare_rows_f16 48\ntessera_sm90_backward_f16_d192v128_64x64 120\n"
            "finish_keys_f16 150\nfinish_rows_f16 48\n");
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=6/3 q=200 k=300 d=64 softcap=30"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 48\ntessera_sm90_backward_bf16_d128_64x64_extra 120\n"
            "finish_keys_bf16 120\nfinish_rows_bf16 48\n");
}

// By mma.sync there are as many blocks as multiprocessors have at once, and dQ is finished always.
TEST_F(Launches, ABackwardByMmaIsPreparedAndFinished) {
  cuda::Environment environment;
  environment.set("TESSERA_GPU_AS", "a100");
  gpu_ = *this_gpu(1);
  ASSERT_TRUE(enqueue("bwd bf16 b=40 h=6/3 q=200 k=300 d=64 causal"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 960\n"  // four of 64
            "tessera_sm80_backward_bf16_d64_64x128_w4 264\n"
            "finish_rows_bf16 960\n");
  ASSERT_TRUE(enqueue("bwd f16 b=2 h=6/3 q=200 k=300 d=128 deterministic"));
  EXPECT_EQ(launched(),
            "prepare_rows_f16 48\ntessera_sm80_backward_f16_d128_64x128_w4 18\n"
            "finish_rows_f16 48\n");
}

// Hopper's wide rows are pairs of blocks, or, of any layout, rows by mma.sync, whose sums lie
// otherwise.
TEST_F(Launches, ABackwardOfWideHeadsIsFinishedAsItsRowSums) {
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=6/3 q=200 k=300 d=512"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 48\n"                           // four blocks of 64 rows
            "tessera_sm90_backward_bf16_d512_64x64_pair 60\n"  // five of 64 keys, two blocks each
            "finish_rows_bf16 48\n");
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=6/3 q=200 k=300 d=509"));
  EXPECT_EQ(launched(),
            "prepare_rows_bf16 84\n"                                   // seven blocks of 32 rows
            "tessera_sm90_backward_bf16_d512_32x32_w1x4_do2_any 60\n"  // ten of 32 keys
            "finish_mma_rows_bf16 84\n");
  ASSERT_TRUE(enqueue("bwd f16 h=2 q=64 k=0 d=264"));
  EXPECT_EQ(launched(), "prepare_rows_f16 2\nfinish_rows_f16 2\n");
  // As many blocks as multiprocessors, whole pairs of them.
  ASSERT_TRUE(enqueue("bwd bf16 b=2 h=64 q=64 k=300 d=512"));
  EXPECT_NE(launched().find("_pair 132\n"), std::string::npos);
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

// It begins as zeros, and ends as sums where several scores share an element.
TEST_F(Launches, ABiasGradientIsBegunAndFinishedWhereItIsAskedFor) {
  const std::string others =
      "tessera_sm90_backward_bf16_d128_64x64_extra 80\nfinish_keys_bf16 80\n"
      "finish_rows_bf16 16\n";
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
    return std::pair(seen.main.dbias_adds, seen.main.dbias_strides);
  };
  using Strides = core::BiasStrides;
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
       {"bf16 h=4/2 q=200 k=300 d=64", "f16 h=2 q=640 k=640 d=128 causal",
        "bf16 h=2 q=64 k=64 d=256", "bf16 h=2 q=64 k=64 d=20 softcap=30 window=5,7 align=tl",
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
      EXPECT_EQ(seen.prepare.sequences, seen.main.sequences) << words << order;
      EXPECT_EQ(seen.prepare.window, seen.main.window) << words << order;
      ASSERT_NE(address_of("turns"), nullptr) << words << order;
      EXPECT_EQ(seen.main.turns, address_of("turns")) << words << order;
      EXPECT_EQ(seen.prepare.turns, seen.main.turns) << words << order;
      EXPECT_EQ(seen.main.next_tile, address_of("next_tile")) << words << order;
      EXPECT_EQ(seen.prepare.next_tile, seen.main.next_tile) << words << order;
    }
  }
}

// And where that is faster: of sequences that are not long, whose keys nobody shares.
TEST_F(Launches, ABackwardOfSequencesThatAreNotLongTakesTurns) {
  const auto in_order = [&](const char* words) {
    const Problem problem = problem_of(words);
    const BackwardLaunches seen = watch(problem, tensors_of(problem));
    EXPECT_TRUE(seen.status) << seen.status.text;
    EXPECT_EQ(seen.prepare.first_stores, seen.main.in_order) << words;
    return seen.main.in_order;
  };
  EXPECT_TRUE(in_order("bwd bf16 b=1 h=256 q=128 k=128 d=64 causal"));
  EXPECT_TRUE(in_order("bwd bf16 b=1 h=256 q=128 k=128 d=128 causal"));
  EXPECT_TRUE(in_order("bwd bf16 b=1 h=256 q=128 k=128 d=64"));
  EXPECT_TRUE(in_order("bwd bf16 b=1 h=256 q=128 k=77 d=128"));
  EXPECT_TRUE(in_order("bwd bf16 h=16 q=4096 k=4096 d=128 causal"));
  EXPECT_FALSE(in_order("bwd bf16 h=16 q=4160 k=4160 d=128 causal"));
  EXPECT_TRUE(in_order("bwd bf16 b=8 h=64/32 q=192 k=192 d=128 causal"));
  EXPECT_FALSE(in_order("bwd bf16 h=64/32 q=1088 k=1088 d=128 causal"));
  EXPECT_FALSE(in_order("bwd bf16 b=4 h=64 q=64 k=64 d=128 packed=200,200"));
  EXPECT_FALSE(in_order("bwd bf16 b=1 h=32 q=128 k=1088 d=128"));
  EXPECT_TRUE(in_order("bwd bf16 b=1 h=32 q=128 k=1088 d=64"));
  EXPECT_FALSE(in_order("bwd bf16 b=1 h=32 q=128 k=2112 d=64"));
  EXPECT_FALSE(in_order("bwd bf16 b=1 h=256 q=128 k=128 d=128 window=50,0"));
  EXPECT_FALSE(in_order("bwd bf16 b=1 h=256 q=128 k=128 d=256 causal"));
  EXPECT_FALSE(in_order("bwd bf16 b=1 h=256 q=128 k=130 d=128 causal"));
  EXPECT_FALSE(in_order("bwd bf16 b=1 h=2/1 q=128 k=128 d=128 causal"));
}

// What pieces leave is what is summed, and where it goes is where the others write.
TEST_F(Launches, SharedKeysAreSummed) {
  for (const std::string words :
       {"bf16 h=8/2 q=300 k=300 d=64", "f16 h=4/1 q=600 k=600 d=256 causal",
        "bf16 b=2 h=4/2 q=300 k=300 d=128 packed=400,500 softcap=20"}) {
    const Problem problem = problem_of(("bwd " + words).c_str());
    Tensors tensors = tensors_of(problem);
    tensors.dk.stride_head += 8;
    tensors.dv.stride_seqlen += 80;
    const Result<Plan> planned = plan(problem, gpu_);
    ASSERT_TRUE(planned.ok()) << planned.status().text;
    const BackwardLaunches seen = watch(problem, tensors);
    ASSERT_TRUE(seen.status) << seen.status.text;
    const cuda::sm90::KeySums& sums = seen.finish_keys.sums;
    const PlanData& data = planned->data();
    ASSERT_GT(data.work.splits, 1) << words;
    ASSERT_NE(sums.data, nullptr) << words;
    EXPECT_EQ(sums.data, seen.main.key_sums.data) << words;
    EXPECT_EQ(sums.splits, data.work.splits) << words;
    EXPECT_EQ(sums.heads, data.work.heads) << words;
    EXPECT_EQ(sums.blocks, data.work.blocks) << words;
    EXPECT_EQ(sums.pieces, seen.main.key_sums.pieces) << words;
    EXPECT_EQ(sums.pieces_of_dv, seen.main.key_sums.pieces_of_dv) << words;
    const auto& regions = data.regions;
    const auto region = std::find_if(regions.begin(), regions.end(), [](const auto& r) {
      return std::string(r.name) == "key_sums";
    });
    ASSERT_NE(region, regions.end()) << words;
    const float* const end = sums.at(static_cast<int>(problem.batch) - 1, sums.heads - 1,
                                     sums.blocks - 1, sums.splits - 1) +
                             std::int64_t{sums.pieces} * cuda::sm90::kPieceFloats;
    EXPECT_EQ(static_cast<std::uint64_t>(end - sums.data) * sizeof(float), region->bytes) << words;
    EXPECT_EQ(seen.finish_keys.dk, tensors.dk.data) << words;
    EXPECT_EQ(seen.finish_keys.dv, tensors.dv.data) << words;
    EXPECT_EQ(seen.finish_keys.dk_strides.head, tensors.dk.stride_head) << words;
    EXPECT_EQ(seen.finish_keys.dv_strides.seqlen, tensors.dv.stride_seqlen) << words;
    EXPECT_EQ(seen.finish_keys.sequences, seen.main.sequences) << words;
    EXPECT_EQ(seen.finish_keys.block_n, data.kernel.block_n) << words;
    const Problem alone = problem_of(("bwd " + words + " batch_invariant").c_str());
    EXPECT_EQ(watch(alone, tensors_of(alone)).main.key_sums.data, nullptr) << words;
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
      EXPECT_EQ(params.dq_strides.batch, tensors.dq.stride_batch) << words;
      EXPECT_EQ(params.sequences.packed(), problem.packed) << words;
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
  refused("bf16 h=2 q=64 k=64 d=520", "head_dim = 520");
  refused("f16 h=2 q=64 k=64 d=64/513", "head_dim_v = 513");
}

TEST_F(Launches, EveryOtherBackwardHasARow) {
  const auto kernel_of = [&](const std::string& words) {
    EXPECT_TRUE(enqueue(("bwd bf16 h=2 q=512 k=512 " + words).c_str())) << words;
    const auto& all = fake::state().launches;
    const std::string kernel = all.size() >= 2 && all.size() <= 4 ? all[1].kernel : launched();
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

}  // namespace
}  // namespace tessera
