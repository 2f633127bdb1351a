// Estimates that tell the rows of one kind of device apart; select.h's cost() is either.
#pragma once

#include "plan/gpu_facts.h"
#include "plan/plan.h"

namespace tessera {

/// Cycles of a core for some rows of a key/value head that see so many keys each, on average.
double cpu_piece_cost(const PlanData& plan, double rows, double keys);
/// Cycles of a multiprocessor for a tile that takes so many steps: blocks of keys, and backward
/// also tiles of rows, of block_m x block_n pairs each.
double gpu_piece_cost(const PlanData& plan, const GpuCosts& costs, double steps);

/// Cycles of a core for one key/value head.
double cpu_cost(const PlanData& plan);
/// Cycles of a multiprocessor for one query head.
double gpu_cost(const PlanData& plan, const GpuCosts& costs);

}  // namespace tessera
