// The target of all GPUs since Ampere: who runs its code, and the launches.
#pragma once

#include "cuda/sm80/programs.h"
#include "cuda/target.h"

namespace tessera::cuda::sm80 {

Status run_forward(const PlanData& plan, const Tensors& tensors, void* workspace,
                   const Queue& queue);
Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue);

inline constexpr Target kTarget = {
    &kArchitecture,
    "Ampere and newer, from 8.0 on",
    [](int capability) { return capability >= 80; },
    run_forward,
    run_backward,
};

}  // namespace tessera::cuda::sm80
