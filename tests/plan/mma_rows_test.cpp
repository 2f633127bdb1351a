// The planner's choice among rows by mma.sync: what a device's blocks may have of shared memory,
// and its types, decide.
#include <gtest/gtest.h>

#include <iterator>
#include <string>

#include "plan/planned.h"
#include "plan/select.h"

namespace tessera {
namespace {

// How many queries a packed batch has tells how often decoding reads its keys. Which row it is must
// not depend on that where bits may not.
TEST(Planner, PackedQueriesDoNotDecideOnRowsByMma_S9) {
  for (const char* device : {"b200", "a100", "rtx-4090"}) {
    for (const char* head_dim : {"d=128", "d=512"}) {
      std::string first;
      for (const char* total : {"8", "64", "256"}) {
        const std::string problem =
            "fwd bf16 b=4 h=32/8 q=64 k=4096 cache=after causal "
            "batch_invariant packed=" +
            std::string(total) + " " + head_dim;
        const Result<Plan> planned = plan(problem_of(problem), *named_device(device));
        ASSERT_TRUE(planned) << planned.status().text;
        if (first.empty()) first = planned->kernel();
        EXPECT_EQ(planned->kernel(), first) << device << ": " << problem;
      }
    }
  }
}

// A tile of few rows would be cheap for few queries, but no build has its code.
TEST(Planner, RowsThatAreMadeAtNeedAreForWideHeads) {
  for (const char* device : {"h200", "a100", "rtx-4090"}) {
    for (const char* problem :
         {"fwd f16 b=3 h=4/2 q=17 k=1 d=128 softcap=5 bias=hk dropout=0.3",
          "fwd bf16 q=1 k=1 d=256", "fwd bf16 h=2 q=17 k=63 d=65 dropout=0.3",
          "fwd bf16 b=2 h=4 q=1 k=900 d=256 cache=full", "bwd bf16 q=1 k=1 d=256",
          "bwd f16 h=2 q=17 k=20 d=128 dropout=0.1"}) {
      const Result<Plan> planned = plan(problem_of(problem), *named_device(device));
      ASSERT_TRUE(planned) << planned.status().text;
      EXPECT_FALSE(core::is_made_at_need(planned->data().kernel)) << device << ": " << problem;
    }
  }
}

// More rows than are decoded at once are tiles, with all that tiles have.
TEST(Planner, TilesTakeCaches_S13) {
  const std::string cache = "h=32/8 k=4096 causal cache=after pages=16384x16 ";
  const struct {
    const char *device, *words, *row;
  } all[] = {
      {"b200", "bf16 b=8 q=512 d=128", "sm80.forward.bf16.d128.128x64.w4"},
      {"a100", "bf16 b=8 q=512 d=128", "sm80.forward.bf16.d128.128x32.w4"},
      {"rtx-4090", "bf16 b=8 q=512 d=128", "sm80.forward.bf16.d128.128x64.w8"},
      {"t4", "f16 b=8 q=512 d=128", "sm75.forward.f16.d128.128x32.w4"},
      {"a100", "bf16 b=8 q=512 d=512", "sm80.forward.bf16.d512.64x32.w4x2"},
      {"a100", "bf16 b=8 q=512 d=64 softcap=30", "sm80.forward.bf16.d64.128x64.w4.softcap"},
      {"a100", "bf16 b=8 q=512 d=100 leftpad", "sm80.forward.bf16.d128.128x64.w8.any"},
      // What decoding has not.
      {"a100", "bf16 q=1 d=64 dropout=0.1", "sm80.forward.bf16.d64.128x64.w8.extra"},
      {"a100", "bf16 q=1 d=63", "sm80.forward.bf16.d64.128x64.w8.any"},
      {"b200", "bf16 b=4 q=128 d=128", "sm80.forward.bf16.d128.128x64.w8"},
      // Few rows, or so few tiles that most multiprocessors would have none.
      {"b200", "bf16 b=2 q=128 d=128", "sm80.forward.decode.bf16.d128.16x64"},
      {"rtx-4090", "bf16 q=64 d=128", "sm80.forward.decode.bf16.d128.16x32"},
      {"a100", "bf16 b=64 q=4 d=128", "sm80.forward.decode.bf16.d128.16x64"},
      {"a100", "bf16 q=32 d=128", "sm80.forward.decode.bf16.d128.16x64"},
      // Decoding reads keys again for every 16 rows; those that are under way at once, together.
      {"b200", "bf16 b=16 q=8 d=128", "sm80.forward.decode.bf16.d128.16x64"},
      {"b200", "bf16 b=16 q=16 d=128", "sm80.forward.bf16.d128.128x64.w8"},
      {"b200", "bf16 b=64 q=8 d=128", "sm80.forward.bf16.d128.128x64.w4"},
      {"rtx-4090", "bf16 b=16 q=8 d=256", "sm80.forward.bf16.d256.64x64.w4"},
  };
  for (const auto& [device, words, row] : all) {
    const Result<Plan> planned = plan(problem_of("fwd " + cache + words), *named_device(device));
    ASSERT_TRUE(planned) << planned.status().text;
    EXPECT_EQ(planned->kernel(), row) << device << ": " << words;
  }
}

// Turing multiplies fp16 alone, and its blocks have 64 KB: all of it fits there.
TEST(Planner, TuringHasRowsOfItsOwn) {
  const Result<Device> t4 = named_device("t4");
  ASSERT_TRUE(t4) << t4.status().text;
  const struct {
    const char* problem;
    const char* row;
  } all[] = {
      {"fwd f16 h=16 q=4096 k=4096 d=64 causal", "forward.f16.d64.128x48.w4"},
      {"fwd f16 h=16 q=4096 k=4096 d=72", "forward.f16.d128.128x32.w4"},
      {"fwd f16 h=16 q=4096 k=4096 d=192/128 sink", "forward.f16.d256.64x16.w4"},
      {"fwd f16 h=16 q=4096 k=4096 d=128 softcap=30", "forward.f16.d128.64x32.w4.extra"},
      {"fwd f16 h=16 q=4096 k=4096 d=63", "forward.f16.d64.64x64.w4.any"},
      {"bwd f16 h=16 q=4096 k=4096 d=64", "backward.f16.d64.64x128.w8"},
      {"bwd f16 h=16 q=4096 k=4096 d=128 deterministic", "backward.f16.d128.32x64.w4"},
      {"bwd f16 h=16 q=4096 k=4096 d=256", "backward.f16.d256.32x32.q1.w2"},
      {"bwd f16 h=16 q=4096 k=4096 d=256 dropout=0.1", "backward.f16.d256.32x16.q1.w1.extra"},
      {"bwd f16 h=16 q=4096 k=4096 d=200 unaligned", "backward.f16.d256.32x16.q1.w1.any"},
      {"fwd f16 b=9 h=16/4 q=1 k=4096 d=256 cache=full", "forward.decode.f16.d256v128.16x16"},
      {"fwd f16 b=9 h=16/4 q=1 k=4096 d=128 cache=full kv=e4m3 scales=none/head/token",
       "forward.decode.e4m3.d128.16x32"},
  };
  for (const auto& [problem, row] : all) {
    const Result<Plan> planned = plan(problem_of(problem), *t4);
    ASSERT_TRUE(planned) << planned.status().text;
    EXPECT_EQ(planned->kernel(), std::string("sm75.") + row) << problem;
  }
  const Result<Plan> other = plan(problem_of("fwd bf16 h=16 q=4096 k=4096 d=64"), *t4);
  ASSERT_FALSE(other);
  EXPECT_NE(
      other.status().text.find("the problem is bf16, which GPUs before Ampere do not multiply: "
                               "cast to fp16"),
      std::string::npos)
      << other.status().text;
}

// Of rows by mma.sync what a block may have of shared memory decides, in both passes.
TEST(Planner, RowsByMmaFitTheSharedMemory) {
  const struct {
    const char* device;
    const char* rows[16];
  } all[] = {
      {"b200",
       {"forward.bf16.d256.128x64.w4x2", "backward.bf16.d64.64x128.w4",
        "backward.bf16.d128.64x128.w4.do2", "backward.bf16.d192v128.64x64.w4.do2",
        "backward.bf16.d256.64x64.w4.do2", "backward.bf16.d256.64x64.q1.w4.extra",
        "backward.bf16.d256.64x64.q1.w4.any", "forward.bf16.d256.64x64.w4",
        "forward.bf16.d512.64x64.w2x4", "forward.bf16.d384.64x64.w4x2",
        "forward.decode.bf16.d512.16x32", "backward.bf16.d512.32x32.w1x4.do2",
        "backward.bf16.d384.32x32.w1x4.do2", "backward.bf16.d512.32x32.w1x4.extra",
        "forward.decode.e4m3.d512v128.16x32", "forward.decode.i8.d512v128.16x32"}},
      {"a100",
       {"forward.bf16.d256.128x64.w4x2", "backward.bf16.d64.64x128.w4",
        "backward.bf16.d128.64x128.w4", "backward.bf16.d192v128.64x64.w4.do2",
        "backward.bf16.d256.64x64.q1.w4", "backward.bf16.d256.64x64.q1.w4.extra",
        "backward.bf16.d256.64x64.q1.w4.any", "forward.bf16.d256.128x64.w4x2",
        "forward.bf16.d512.64x32.w4x2", "forward.bf16.d384.64x64.w4x2",
        "forward.decode.bf16.d512.16x32", "backward.bf16.d512.32x32.w1x4",
        "backward.bf16.d384.32x32.w1x4.do2", "backward.bf16.d512.32x32.w1x4.extra",
        "forward.decode.e4m3.d512v128.16x32", "forward.decode.i8.d512v128.16x32"}},
      {"rtx-4090",
       {"forward.bf16.d256.64x64.w4", "backward.bf16.d64.64x128.w8", "backward.bf16.d128.64x128.w8",
        "backward.bf16.d192v128.32x64.w4", "backward.bf16.d256.32x64.q1.w4",
        "backward.bf16.d256.32x64.q1.w4.extra", "backward.bf16.d256.32x64.q1.w4.any",
        "forward.bf16.d256.64x64.w4", "forward.bf16.d512.32x32.w2x2",
        "forward.bf16.d384.32x32.w2x2", "forward.decode.bf16.d512.16x16",
        "backward.bf16.d512.16x32.w1x4", "backward.bf16.d384.16x32.w1x4.do2",
        "backward.bf16.d512.16x32.w1x4.extra", "forward.decode.e4m3.d512v128.16x16",
        "forward.decode.i8.d512v128.16x16"}},
  };
  const char* const problems[16] = {
      "fwd bf16 h=16 q=4096 k=4096 d=256",
      "bwd bf16 h=16 q=4096 k=4096 d=64",
      "bwd bf16 h=16 q=4096 k=4096 d=120",
      "bwd bf16 h=16 q=4096 k=4096 d=192/128",
      "bwd bf16 h=16 q=4096 k=4096 d=256",
      "bwd bf16 h=8 q=512 k=512 d=256 alibi=h",
      "bwd bf16 h=8 q=512 k=512 d=256 unaligned",
      "fwd bf16 h=16 q=512 k=512 d=256 causal",
      "fwd bf16 h=16 q=4096 k=4096 d=512",
      "fwd bf16 h=16 q=4096 k=4096 d=264/384",
      "fwd bf16 h=16 q=1 k=4096 d=320",
      "bwd bf16 h=16 q=4096 k=4096 d=512",
      "bwd bf16 h=16 q=4096 k=4096 d=384/264",
      "bwd bf16 h=16 q=4096 k=4096 d=512 alibi=h",
      "fwd bf16 h=16 q=1 k=4096 d=512 kv=e4m3 scales=none/head/token cache=full",
      "fwd bf16 h=16 q=1 k=4096 d=512/272 kv=i8 scales=none/token/head cache=full"};
  for (const auto& [device, rows] : all) {
    const Result<Device> gpu = named_device(device);
    ASSERT_TRUE(gpu) << gpu.status().text;
    for (std::size_t i = 0; i < std::size(problems); ++i) {
      const Result<Plan> planned = plan(*parse_problem(problems[i]), *gpu);
      ASSERT_TRUE(planned) << planned.status().text;
      EXPECT_EQ(planned->kernel(), std::string("sm80.") + rows[i]) << device << ": " << problems[i];
    }
  }
}

}  // namespace
}  // namespace tessera
