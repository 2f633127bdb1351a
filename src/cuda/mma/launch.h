// Runs a plan of a forward whose row multiplies by mma.sync, of either form.
#pragma once

#include "cuda/launch.h"

namespace tessera::cuda::mma {

/// Errors: invalid (a tensor whose rows cannot be loaded), device.
Status run_forward(const PlanData& plan, const Tensors& tensors, void* workspace,
                   const Queue& queue);

}  // namespace tessera::cuda::mma
