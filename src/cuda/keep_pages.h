// Pages that a table does not skip (S13): listed in the workspace before a forward runs. Called by
// its launch.
#pragma once

#include <cstddef>

#include "cuda/aux/keep_pages_params.h"
#include "cuda/launch.h"
#include "plan/layout_pages.h"

namespace tessera::cuda {

/// What the kernel is given.
aux::KeepPagesParams keep_pages_params(const Problem& problem, const Tensors& tensors,
                                       const KeptPagesLayout& layout);

/// Enqueues the kernel, and makes the cache of `tensors` what it lists.
Status keep_pages(const PlanData& plan, Tensors& tensors, void* workspace, const Queue& queue);

}  // namespace tessera::cuda
