// The launch of a backward row by mma.sync.
#pragma once

#include "cuda/auxiliary.h"
#include "cuda/launch.h"

namespace tessera::cuda::mma {

/// Errors: invalid (a tensor whose rows cp.async cannot address), device.
Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue);
/// The same. finish: what makes dQ of its sums, where the architecture has rows of other kinds.
Status run_rows(const PlanData& plan, const Tensors& tensors, void* workspace, const Queue& queue,
                const FinishKernels& finish);

}  // namespace tessera::cuda::mma
