// What the kernel that merges partial results is told of them.
#pragma once

#include "cuda/aux/combine_params.h"
#include "cuda/launch.h"
#include "tessera/partial.hpp"

namespace tessera::cuda {

/// Of what has been validated.
aux::CombineParams combine_params(const PartialResults& results, const PartialTensors& tensors);

/// Enqueues it; kernels: Target::combine of the queue's architecture. Errors: device.
Status combine(const PartialResults& results, const PartialTensors& tensors, std::size_t kernels,
               const Queue& queue);

}  // namespace tessera::cuda
