// The CPU backend's door: finds the kernel of a plan's catalog row among the instruction sets
// compiled in, and runs it. Called by tessera.cpp.
#pragma once

#include "plan/plan.h"

namespace tessera::cpu {

/// Runs the plan on this machine's CPU. The tensors have been validated, the workspace is large
/// enough.
Status run(const PlanData& plan, const Tensors& tensors, void* workspace,
           const Execution& execution);

/// As tessera::measure_peaks.
Result<Peaks> measure_peaks(const Device& device, double seconds, const Executor* executor);

}  // namespace tessera::cpu
