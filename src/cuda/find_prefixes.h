// Prefixes that neighbouring sequences share (S13): found in the page table before a decoding row
// runs that reads them once. Called by its launch.
#pragma once

#include "cuda/aux/find_prefixes_params.h"
#include "plan/layout.h"

namespace tessera::cuda {

/// What the kernel is given. ticket: the run's own number, not 0.
aux::FindPrefixesParams find_prefixes_params(const PlanData& plan, const Tensors& tensors,
                                             const GpuPrefixLayout& layout, std::uint32_t ticket);

}  // namespace tessera::cuda
