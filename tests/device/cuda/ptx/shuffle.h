// In place of src/cuda/ptx/shuffle.h where kernels run on fibers (fibers.h).
#pragma once

#include "cuda_names.h"

namespace tessera::cuda::ptx {

template <typename Word, int kCount>
void exchange(const Word (&x)[kCount], int lanes, Word (&y)[kCount]) {
  for (int i = 0; i < kCount; ++i) y[i] = __shfl_xor_sync(~0U, x[i], lanes);
}

}  // namespace tessera::cuda::ptx
