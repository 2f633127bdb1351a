#include "cuda/mma/launch.h"

#include "cuda/keep_pages.h"
#include "cuda/mma/decode_launch.h"
#include "cuda/mma/forward_launch.h"

namespace tessera::cuda::mma {

Status run_forward(const PlanData& plan, const Tensors& tensors, void* workspace,
                   const Queue& queue) {
  Tensors read = tensors;
  if (lists_pages(plan)) {
    if (Status s = keep_pages(plan, read, workspace, queue); !s) return s;
  }
  if (plan.kernel.form == core::Form::decode) return run_decode(plan, read, workspace, queue);
  return run_tiles(plan, read, queue);
}

}  // namespace tessera::cuda::mma
