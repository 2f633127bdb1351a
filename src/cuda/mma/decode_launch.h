// Runs a plan whose row decodes, on any GPU that such rows are for.
#pragma once

#include "cuda/launch.h"

namespace tessera::cuda::mma {

/// combine_kernel: Target::combine of the queue's architecture. Errors: invalid (a tensor that is
/// not aligned), device.
Status run_decode(const PlanData& plan, const Tensors& tensors, void* workspace,
                  std::size_t combine_kernel, const Queue& queue);

}  // namespace tessera::cuda::mma
