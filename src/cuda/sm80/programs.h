// What every GPU since Ampere runs, as programs for NVRTC.
#pragma once

#include "cuda/architecture.h"

namespace tessera::cuda::sm80 {

extern const Architecture kArchitecture;

}  // namespace tessera::cuda::sm80
