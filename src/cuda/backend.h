// The GPU backend's door: finds the machine code of a plan's catalog row and launches it. Called by
// tessera.cpp.
#pragma once

#include "plan/plan.h"

namespace tessera::cuda {

/// The GPU with this ordinal as the planner sees it. Errors: device (no driver, no such GPU, or one
/// that no kernel runs on).
Result<Device> device_at(int ordinal);

/// As tessera::driver_version.
Result<std::string> driver_version();

/// Does the row fit the device, and is its code part of this build, kept or to be made here?
bool has_code(const core::Kernel& row, const Device& device);

/// As tessera::prepare and compile_ahead, of a plan for a GPU.
/// @{
Status prepare(const PlanData& plan);
Result<std::size_t> compile_ahead(const PlanData& plan);
/// @}

/// Enqueues the plan on execution.stream of its device. The problem fits the tensors; their memory
/// is the device's. Errors: invalid (an address or stride that the copy engine cannot take),
/// device.
Status run(const PlanData& plan, const Tensors& tensors, void* workspace,
           const Execution& execution);

/// Enqueues the merge of partial results, which have been validated, on execution.stream of the
/// device. Errors: device.
Status combine(const PartialResults& results, const PartialTensors& tensors, const Device& device,
               const Execution& execution);

/// Enqueues an append, of which all but what lies in the device's memory has been validated, on
/// execution.stream of the device. Errors: device.
Status append(const AppendShape& shape, const AppendTensors& tensors, const Device& device,
              const Execution& execution);

/// Enqueues quantising of what has been validated in the same way. Errors: unsupported, device.
Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors, const Device& device,
                const Execution& execution);

/// As tessera::measure_peaks; fp32 is not measured. Errors: device.
Result<Peaks> measure_peaks(const Device& device, double seconds);

}  // namespace tessera::cuda
