// Runs a forward plan whose row multiplies by mma.sync, on any GPU that such rows are for.
#pragma once

#include "cuda/launch.h"

namespace tessera::cuda::mma {

/// Errors: invalid (a tensor that is not aligned), device.
Status run_tiles(const PlanData& plan, const Tensors& tensors, const Queue& queue);

}  // namespace tessera::cuda::mma
