// The CPU backend's door: finds the kernel of a plan's catalog row among the instruction sets
// compiled in, and runs it. Called by tessera.cpp.
#pragma once

#include "plan/plan.h"

namespace tessera::cpu {

/// Runs the plan on this machine's CPU. The tensors have been validated, the workspace is large
/// enough.
Status run(const PlanData& plan, const Tensors& tensors, void* workspace,
           const Execution& execution);

/// Merges partial results, which have been validated, with the device's instruction set. Errors:
/// invalid (the executor), device (this machine does not have it).
Status combine(const PartialResults& results, const PartialTensors& tensors, const Device& device,
               const Execution& execution);

/// Appends what has been validated. Errors: as combine().
Status append(const AppendShape& shape, const AppendTensors& tensors, const Device& device,
              const Execution& execution);

/// Quantises what has been validated. Errors: as combine().
Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors, const Device& device,
                const Execution& execution);

/// As tessera::measure_peaks.
Result<Peaks> measure_peaks(const Device& device, double seconds, const Executor* executor);

}  // namespace tessera::cpu
