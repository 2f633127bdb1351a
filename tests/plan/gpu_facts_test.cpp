// What the planner knows of a GPU architecture is what its costs follow, and nothing else.
#include "plan/gpu_facts.h"

#include <gtest/gtest.h>

#include "plan/catalog.h"
#include "plan/cost.h"
#include "plan/select.h"

namespace tessera {
namespace {

/// Whether any row of the architecture costs something else by these numbers, for any of a few
/// problems of both passes.
bool costs_differ(const GpuFacts& facts, const GpuCosts& costs) {
  const Device device = {"test", facts.arch, 132, 232448, 50 << 20};
  for (const char* text :
       {"fwd bf16 h=2 q=4096 k=4096 d=256", "fwd bf16 h=2 q=512 k=512 d=128",
        "fwd bf16 h=2 q=4096 k=4096 d=128", "fwd bf16 h=2 q=4096 k=4096 d=64 alibi=h",
        "fwd bf16 h=2 q=512 k=512 d=64 softcap=9", "bwd bf16 h=2 q=1024 k=1024 d=128",
        "bwd bf16 h=2 q=1024 k=1024 d=256", "fwd bf16 h=2 q=512 k=512 d=512",
        "fwd bf16 h=2 q=512 k=512 d=512 alibi=h", "fwd bf16 h=2 q=512 k=512 d=63",
        "fwd bf16 h=2 q=512 k=512 d=511"}) {
    Result<Problem> problem = parse_problem(text);
    EXPECT_TRUE(problem.ok()) << problem.status().text;
    if (facts.arch == Arch::sm75) problem->dtype = Dtype::f16;
    for (const core::Kernel& row : kCatalog) {
      if (row.arch != facts.arch || !refusal(row, *problem, device).empty()) continue;
      const PlanData planned = plan_row(row, *problem, device);
      if (gpu_cost(planned, costs) != gpu_cost(planned, facts.costs)) return true;
    }
  }
  return false;
}

// No constant of one architecture is used for another: each that matters is one of these. Those
// that it does not have are as they are by themselves.
TEST(GpuFacts, EveryNumberOfAnArchitectureIsUsed) {
  for (const GpuFacts& facts : kGpuFacts) {
    EXPECT_FALSE(costs_differ(facts, facts.costs));
    int used = 0;
    const auto expect_used = [&](auto member, auto value) {
      GpuCosts costs = facts.costs;
      if (costs.*member == GpuCosts().*member) return;
      ++used;
      EXPECT_NE(costs.*member, value);
      costs.*member = value;
      EXPECT_TRUE(costs_differ(facts, costs)) << "set to " << value;
    };
    for (double GpuCosts::* const member :
         {&GpuCosts::multiply_adds, &GpuCosts::step, &GpuCosts::latency,
          &GpuCosts::latency_of_roles, &GpuCosts::extras, &GpuCosts::any_layout,
          &GpuCosts::tile_row, &GpuCosts::wait, &GpuCosts::waiting_step, &GpuCosts::crowded,
          &GpuCosts::crowded_of_few, &GpuCosts::crowded_tile_row}) {
      expect_used(member, 8.0 * facts.costs.*member);
    }
    for (int GpuCosts::* const member :
         {&GpuCosts::uncrowded_rows, &GpuCosts::uncrowded_dim, &GpuCosts::few_rows}) {
      expect_used(member, 8 * facts.costs.*member);
    }
    const auto expect_used_of_mma = [&](auto member) {
      GpuCosts costs = facts.costs;
      if (costs.mma.*member == MmaCosts().*member) return;
      ++used;
      costs.mma.*member *= 8;
      EXPECT_TRUE(costs_differ(facts, costs)) << "set to " << costs.mma.*member;
    };
    expect_used_of_mma(&MmaCosts::much_memory);
    for (double MmaCosts::* const member :
         {&MmaCosts::multiply_adds, &MmaCosts::waiting, &MmaCosts::alone, &MmaCosts::latency,
          &MmaCosts::softcap, &MmaCosts::extras, &MmaCosts::any_layout, &MmaCosts::tile,
          &MmaCosts::shared_tile, &MmaCosts::shared}) {
      expect_used_of_mma(member);
    }
    EXPECT_EQ(used, facts.arch == Arch::sm90 ? 24 : facts.arch == Arch::sm80 ? 11 : 6);
  }
}

}  // namespace
}  // namespace tessera
