// Runs a plan whose row decodes, on any GPU that such rows are for.
#pragma once

#include "cuda/launch.h"

namespace tessera::cuda::mma {

/// Errors: invalid (a tensor that is not aligned), device.
Status run_decode(const PlanData& plan, const Tensors& tensors, void* workspace,
                  const Queue& queue);

}  // namespace tessera::cuda::mma
