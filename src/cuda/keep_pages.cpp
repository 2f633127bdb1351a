#include "cuda/keep_pages.h"

namespace tessera::cuda {

aux::KeepPagesParams keep_pages_params(const Problem& problem, const Tensors& tensors,
                                       const KeptPagesLayout& layout) {
  return {sequences_of(problem, tensors), given_cache(problem, tensors), layout.table,
          layout.stride, layout.seqlens};
}

Status keep_pages(const PlanData& plan, Tensors& tensors, void* workspace, const Queue& queue) {
  Workspace memory(workspace);
  const KeptPagesLayout layout = layout_kept_pages(memory, plan);
  const aux::KeepPagesParams params = keep_pages_params(plan.problem, tensors, layout);
  tensors.cache = cache_of_kept(layout);
  if (plan.problem.batch == 0) return {};
  return queue.launch_auxiliary(number_of(AuxiliaryKernel::keep_pages), plan.problem.batch,
                                &params);
}

}  // namespace tessera::cuda
