// Hopper's target: who runs its code, and the launches of both passes.
#pragma once

#include "cuda/sm90/programs.h"
#include "cuda/target.h"

namespace tessera::cuda::sm90 {

Status run_forward(const PlanData& plan, const Tensors& tensors, void* workspace,
                   const Queue& queue);
Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue);

/// sm_90a code runs on compute capability 9.0 and nowhere else.
inline constexpr Target kTarget = {
    &kArchitecture, "Hopper, 9.0", [](int capability) { return capability == 90; },
    run_forward,    run_backward,
};

}  // namespace tessera::cuda::sm90
