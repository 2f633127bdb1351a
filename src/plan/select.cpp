// The planner: asks every row of the catalog (refusal.cpp), shapes it to the problem (shape.cpp),
// and takes the cheapest (cost_cpu.cpp, cost_gpu.cpp).
#include "plan/select.h"

#include <limits>

#include "plan/catalog.h"
#include "plan/cost.h"
#include "plan/text.h"

namespace tessera {

std::int64_t cost(const PlanData& plan) {
  const Arch arch = plan.kernel.arch;
  const double total = is_gpu(arch) ? gpu_cost(plan, facts_of(arch).costs) : cpu_cost(plan);
  return total < 9e18 ? static_cast<std::int64_t>(total) : std::numeric_limits<std::int64_t>::max();
}

Status validate(const Device& device) {
  if (device.threads >= 1 && device.threads <= kMaxThreads) return {};
  return Status::invalid(refused("device.threads", device.threads,
                                 "must lie in [1, " + std::to_string(kMaxThreads) + "]"));
}

Result<Plan> plan(const Problem& problem, const Device& device) {
  if (Status s = validate(problem); !s) return s;
  if (Status s = validate(device); !s) return s;
  std::shared_ptr<const PlanData> best;
  std::int64_t best_cost = 0;
  for (const core::Kernel& row : kCatalog) {
    if (!refusal(row, problem, device).empty()) continue;
    auto candidate = std::make_shared<const PlanData>(plan_row(row, problem, device));
    const std::int64_t candidate_cost = cost(*candidate);
    // Ties: the catalog lists richer instruction sets of a CPU last, but first what of a GPU's rows
    // takes least. Without queries or keys all of them cost the same.
    const bool wins_tie = !is_gpu(row.arch);
    if (best == nullptr || candidate_cost < best_cost ||
        (candidate_cost == best_cost && wins_tie)) {
      best = std::move(candidate);
      best_cost = candidate_cost;
    }
  }
  if (best == nullptr) {
    return Status::unsupported("no kernel accepts this problem:\n" + explain(problem, device));
  }
  return Plan(std::move(best));
}

}  // namespace tessera
