// What Turing runs, as programs for NVRTC.
#pragma once

#include "cuda/architecture.h"

namespace tessera::cuda::sm75 {

extern const Architecture kArchitecture;

}  // namespace tessera::cuda::sm75
