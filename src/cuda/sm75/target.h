// The target of Turing: who runs its code, and the launches of kernels in mma/.
#pragma once

#include "cuda/mma/backward_launch.h"
#include "cuda/mma/launch.h"
#include "cuda/sm75/programs.h"
#include "cuda/target.h"

namespace tessera::cuda::sm75 {

/// What is newer has a target of its own, and runs this one only where it is asked to.
inline constexpr Target kTarget = {
    &kArchitecture,   "Turing, 7.5",     [](int capability) { return capability >= 75; },
    mma::run_forward, mma::run_backward,
};

}  // namespace tessera::cuda::sm75
