// What the kernel that quantises is told.
#pragma once

#include "cuda/aux/quantize_params.h"
#include "cuda/launch.h"
#include "tessera/quantize.hpp"

namespace tessera::cuda {

/// Of what has been validated, and what refusal() has nothing against.
aux::QuantizeParams quantize_params(const QuantizeShape& shape, const QuantizeTensors& tensors);

/// What the kernel does not do. Errors: unsupported.
Status refusal(const QuantizeShape& shape, const QuantizeTensors& tensors);

/// Enqueues it. Errors: unsupported, device.
Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors, const Queue& queue);

}  // namespace tessera::cuda
