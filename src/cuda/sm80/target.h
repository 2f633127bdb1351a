// The target of all GPUs since Ampere: who runs its code, and the launches of kernels in mma/.
#pragma once

#include "cuda/mma/backward_launch.h"
#include "cuda/mma/launch.h"
#include "cuda/sm80/programs.h"
#include "cuda/target.h"

namespace tessera::cuda::sm80 {

inline constexpr Target kTarget = {
    &kArchitecture,
    "Ampere and newer, from 8.0 on",
    [](int capability) { return capability >= 80; },
    mma::run_forward,
    mma::run_backward,
};

}  // namespace tessera::cuda::sm80
