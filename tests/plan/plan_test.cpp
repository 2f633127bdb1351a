// Plans: the workspace is the same counted and handed out, and ends with the work; explanations;
// what cannot be planned says why.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "plan/catalog.h"
#include "plan/layout.h"
#include "plan/names.h"
#include "plan/planned.h"
#include "plan/select.h"

namespace tessera {
namespace {

TEST(Plan, WorkspaceIsCountedAndHandedOutAlike) {
  int on_gpu = 0;
  for (const char* text :
       {"fwd f32 b=2 h=4 q=300 k=500 d=65/31 bias=hqk", "fwd f16 h=16/2 q=1 k=20000 d=128",
        "bwd bf16 h=6/3 q=77 k=99 d=40 sink", "fwd f32 b=0 h=1 q=0 k=0 d=1",
        "bwd f32 h=1 q=0 k=5 d=1", "bwd bf16 b=3 h=4 q=70 k=80 d=64 packed=150,90",
        "bwd bf16 b=3 h=4 q=70 k=80 d=64 bias=hk sink deterministic"}) {
    for (const core::Kernel& row : kCatalog) {
      const Problem p = problem_of(text);
      const Device device = device_of(is_gpu(row.arch) ? Arch::sm90 : Arch::avx512_bf16, 3);
      if (!refusal(row, p, device).empty()) continue;
      on_gpu += is_gpu(row.arch) && p.pass == Pass::backward ? 1 : 0;
      const PlanData data = plan_row(row, p, device);
      constexpr std::size_t kAlignment = Plan::workspace_alignment;
      std::vector<std::byte> memory(data.workspace_bytes + kAlignment);
      void* start = memory.data();
      std::size_t room = memory.size();
      auto* base =
          static_cast<std::byte*>(std::align(kAlignment, data.workspace_bytes, start, room));
      Workspace pointers(static_cast<void*>(base));
      const PlanLayout laid_out = layout(pointers, data);
      EXPECT_EQ(pointers.bytes(), data.workspace_bytes) << text << " " << name_of(row);
      if (!is_gpu(row.arch)) {
        EXPECT_LE(laid_out.workers + laid_out.worker_bytes * workers_of(data),
                  base + data.workspace_bytes);
      }
      std::size_t end = 0;
      for (const WorkspaceRegion& region : data.regions) {
        EXPECT_GE(region.offset, end) << region.name;
        EXPECT_EQ(region.offset % Plan::workspace_alignment, 0U) << region.name;
        end = region.offset + region.bytes;
      }
      EXPECT_LE(end, data.workspace_bytes);
    }
  }
  EXPECT_GT(on_gpu, 0);
}

TEST(Plan, ExplainShowsTheRowsOfTheDeviceAndTheChoice) {
  const Problem p = problem_of("fwd bf16 b=2 h=8/2 q=1 k=4096 d=128 causal");
  for (const Arch arch : {Arch::avx512_bf16, Arch::sm90}) {
    const std::string text = explain(p, device_of(arch));
    int others = 0, of_other_gpus = 0;
    for (const core::Kernel& row : kCatalog) {
      const bool same_kind = is_gpu(row.arch) == is_gpu(arch);
      const bool other_gpu = same_kind && is_gpu(arch) && row.arch != arch;
      others += same_kind ? 0 : 1;
      of_other_gpus += other_gpu ? 1 : 0;
      EXPECT_EQ(text.find(name_of(row) + " ") != std::string::npos, same_kind && !other_gpu)
          << text;
    }
    const std::string left_out = std::to_string(of_other_gpus) + " rows for other GPUs";
    EXPECT_EQ(text.find(left_out) != std::string::npos, of_other_gpus > 0) << text;
    EXPECT_NE(text.find(std::to_string(others) + " rows for " + (is_gpu(arch) ? "CPUs" : "GPUs")),
              std::string::npos)
        << text;
  }
  const std::string text = explain(p, device_of(Arch::avx512_bf16));
  EXPECT_NE(text.find("e.g. h200"), std::string::npos) << text;
  EXPECT_NE(text.find(to_string(p)), std::string::npos);
  EXPECT_NE(text.find(" * cpu."), std::string::npos) << text;
  EXPECT_NE(text.find("refused: computes the backward pass"), std::string::npos);
  EXPECT_NE(text.find("workspace"), std::string::npos);
}

/// What no row of the device takes: its rows' reasons, and nobody else's.
TEST(Plan, AnUnsupportedProblemNamesTheDevicesRowsOnly) {
  const Status status =
      plan(problem_of("fwd f32 h=8 q=64 k=64 d=64"), device_of(Arch::sm90)).status();
  EXPECT_EQ(status.code, Code::unsupported);
  EXPECT_NE(status.text.find("sm90.forward.bf16.d64.128x128 "), std::string::npos) << status.text;
  EXPECT_EQ(status.text.find("cpu."), std::string::npos) << status.text;
}

/// Workers that can never have work have no memory: from as many on as there are tasks the
/// workspace stays what it is.
TEST(Plan, WorkspaceEndsWithTheWork) {
  const struct {
    const char* problem;
    int tasks;
  } cases[] = {
      {"fwd f32 h=1 q=64 k=64 d=64", 1},
      {"fwd f32 b=2 h=4/2 q=256 k=300 d=64", 32},  // 2 x 2 heads, 512 rows each, in 64s
      {"fwd bf16 b=3 h=8/2 q=1 k=500 d=128", 6},
      {"fwd bf16 h=2/1 q=1 k=5000 d=128", 5},  // splits of 1024 keys
      {"fwd f32 b=0 h=2 q=5 k=5 d=8", 1},
      {"bwd f32 h=1 q=64 k=128 d=64", 2},                // a tile of rows, a block of keys
      {"bwd f32 b=2 h=6/3 q=100 k=300 d=64", 42},        // of each of 6 heads 4 and 3
      {"bwd f32 h=2 q=640 k=128 d=64 bias=qk:f32", 22},  // 2 heads, 10 and 1; bias: 20
      {"bwd f32 h=2/1 q=64 k=64 d=8 bias=hq sink", 3},
  };
  for (const auto& c : cases) {
    const auto bytes = [&c](int threads) {
      const Result<Plan> planned = plan(problem_of(c.problem), device_of(Arch::avx512, threads));
      EXPECT_TRUE(planned.ok()) << planned.status().text;
      return planned.ok() ? planned->workspace_bytes() : 0;
    };
    const int enough = core::max(c.tasks, 2);  // one alone takes longer items
    const std::size_t most = bytes(enough);
    EXPECT_EQ(bytes(enough + 1), most) << c.problem;
    EXPECT_EQ(bytes(kMaxThreads), most) << c.problem;
    if (enough > 2) {
      EXPECT_LT(bytes(enough - 1), most) << c.problem;
    }
  }
}

/// A number of threads that no machine has is a slip, and said to be one; also where nothing is
/// planned.
TEST(Plan, ThreadsHaveAnEnd) {
  const Problem p = problem_of("fwd bf16 h=8 q=64 k=64 d=64");
  for (const Arch arch : {Arch::avx512, Arch::sm90}) {
    EXPECT_TRUE(plan(p, device_of(arch, kMaxThreads)).ok());
    for (const int threads : {-1, 0, kMaxThreads + 1}) {
      const Status status = plan(p, device_of(arch, threads)).status();
      const std::string named =
          "device.threads = " + std::to_string(threads) + ": must lie in [1, ";
      EXPECT_EQ(status.code, Code::invalid);
      EXPECT_EQ(status.text.rfind(named, 0), 0U) << status.text;
      EXPECT_NE(explain(p, device_of(arch, threads)).find(named), std::string::npos);
    }
  }
  Problem none = p;
  none.seqlen_q = 0;
  none.window_right = 0;
  EXPECT_NE(explain(none, device_of(Arch::sm90, 0)).find("threads = 0"), std::string::npos);
}

TEST(Plan, AnInvalidProblemIsExplainedNotPlanned) {
  Problem p = problem_of("fwd f32 h=8/3 q=4 k=4 d=8");
  const Device device = device_of(Arch::avx2);
  EXPECT_EQ(plan(p, device).status().code, Code::invalid);
  EXPECT_NE(explain(p, device).find("num_heads_k = 3"), std::string::npos);
  p.num_heads_k = 8;
  EXPECT_EQ(plan(p, device_of(Arch::avx2, 0)).status().code, Code::invalid);
}

TEST(Plan, TheLargestLegalProblemDoesNotOverflow) {
  Problem p = problem_of("fwd f32 h=8 q=536870912 k=536870912 d=512");
  EXPECT_TRUE(plan(p, device_of(Arch::avx2)).ok());
  // The tiles of its bias are more than can be counted, so every worker has some.
  const Problem biased = problem_of("bwd f32 b=1024 h=4096 q=536870912 k=536870912 d=1 bias=bhqk");
  for (const core::Kernel& row : kCatalog) {
    if (!refusal(row, biased, device_of(Arch::avx512)).empty()) continue;
    EXPECT_EQ(bias_tiles(biased, row).count(), INT64_MAX) << name_of(row);
    EXPECT_EQ(workers_of(plan_row(row, biased, device_of(Arch::avx512, 7))), 7);
  }
  p.batch = kMaxBatch;
  p.num_heads = p.num_heads_k = kMaxHeads;
  const Status refused = validate(p);
  EXPECT_EQ(refused.code, Code::invalid);
  EXPECT_NE(refused.text.find("64-bit"), std::string::npos) << refused.text;
}

}  // namespace
}  // namespace tessera
