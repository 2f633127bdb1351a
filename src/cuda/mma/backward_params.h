// What the backward kernel of mma.sync is given: one value, read by backward.h.
#pragma once

#include "cuda/tile/backward_params.h"

namespace tessera::cuda::mma {

struct BackwardParams : BackwardPass {
  Source q, k, v, dout;  ///< rows of 16 bits, each at a multiple of 16 bytes, but for .any rows
};

}  // namespace tessera::cuda::mma
