// Runs a plan whose row decodes, on any GPU that such rows are for.
#pragma once

#include "cuda/launch.h"

namespace tessera::cuda::mma {

/// find_prefixes: number of the kernel that runs before a row which reads shared prefixes once.
/// Errors: invalid (a tensor that is not aligned), device.
Status run_decode(const PlanData& plan, const Tensors& tensors, void* workspace, const Queue& queue,
                  std::size_t find_prefixes);

}  // namespace tessera::cuda::mma
