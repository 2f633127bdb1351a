// Hopper's kernels as programs for NVRTC.
#pragma once

#include "cuda/architecture.h"

namespace tessera::cuda::sm90 {

extern const Architecture kArchitecture;

}  // namespace tessera::cuda::sm90
