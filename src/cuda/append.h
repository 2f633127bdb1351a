// What the kernel that appends to a cache is told of it.
#pragma once

#include "cuda/aux/append_params.h"
#include "cuda/launch.h"
#include "tessera/append.hpp"

namespace tessera::cuda {

/// Of what has been validated.
aux::AppendParams append_params(const AppendShape& shape, const AppendTensors& tensors);

/// What no kernel does. Errors: unsupported.
Status refusal(const AppendShape& shape);

/// Enqueues it. Errors: unsupported, device.
Status append(const AppendShape& shape, const AppendTensors& tensors, const Queue& queue);

}  // namespace tessera::cuda
