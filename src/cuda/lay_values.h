// Rows of v that a forward of 8 bits wants in tiles (S14): laid out in its workspace before it
// runs. Called by the forward's launch.
#pragma once

#include <cstddef>

#include "cuda/aux/lay_values_params.h"
#include "cuda/launch.h"
#include "plan/layout_gpu.h"

namespace tessera::cuda {

/// What the kernel is given. v: of the problem's tensors.
aux::LayValuesParams lay_values_params(const PlanData& plan, const Tensors& tensors,
                                       const GpuValueLayout& layout);

/// Enqueues the kernel, and makes v of `tensors` the tiles. Errors: invalid (rows
/// that do not begin at multiples of 16 bytes), device.
Status lay_values(const PlanData& plan, Tensors& tensors, void* workspace, const Queue& queue);

}  // namespace tessera::cuda
