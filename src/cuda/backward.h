// The launches of a backward pass that are alike wherever its main kernel comes from: rows are
// prepared, key blocks walk over them, and where these have not done so, dQ is made from its sums.
#pragma once

#include <functional>

#include "cuda/launch.h"
#include "cuda/tile/backward_params.h"
#include "plan/layout_gpu.h"

namespace tessera::cuda {

/// Fills in what main kernels are told alike.
void set_backward(BackwardPass& params, const PlanData& plan, const Tensors& tensors,
                  const GpuBackwardLayout& layout);

/// Enqueues one of two kernels, that of the type, with so many blocks. Errors: device.
Status launch_finish(const Queue& queue, Dtype dtype, const FinishKernels& kernels,
                     std::int64_t blocks, const void* params);

/// Enqueues the kernels around launch_main(), which comes where there is work. finishes: whether
/// the main kernel leaves dQ as sums, of which `finish` makes dQ. Errors: device, and
/// launch_main's.
Status run_around(const PlanData& plan, const Tensors& tensors, const GpuBackwardLayout& layout,
                  const Queue& queue, bool finishes, const FinishKernels& finish,
                  const std::function<Status()>& launch_main);

}  // namespace tessera::cuda
