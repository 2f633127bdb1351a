// The launch of a backward row by mma.sync.
#pragma once

#include "cuda/launch.h"

namespace tessera::cuda::mma {

/// Errors: invalid (a tensor whose rows cp.async cannot address), device.
Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue);

}  // namespace tessera::cuda::mma
