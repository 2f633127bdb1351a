// Estimates that tell the rows of one kind of device apart; select.h's cost() is either.
#pragma once

#include "plan/gpu_facts.h"
#include "plan/plan.h"

namespace tessera {

/// Cycles of a core for one key/value head.
double cpu_cost(const PlanData& plan);
/// Cycles of a multiprocessor for one query head.
double gpu_cost(const PlanData& plan, const GpuCosts& costs);

}  // namespace tessera
