// What the kernel that merges partial results is told of them.
#pragma once

#include "cuda/aux/combine_params.h"
#include "cuda/launch.h"
#include "tessera/partial.hpp"

namespace tessera::cuda {

/// Of what has been validated.
aux::CombineParams combine_params(const PartialResults& results, const PartialTensors& tensors);

/// Enqueues it. Errors: device.
Status combine(const PartialResults& results, const PartialTensors& tensors, const Queue& queue);

}  // namespace tessera::cuda
