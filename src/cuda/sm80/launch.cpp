// From plans to launches of kernels that any GPU since Ampere runs.
#include "cuda/keep_pages.h"
#include "cuda/mma/backward_launch.h"
#include "cuda/mma/decode_launch.h"
#include "cuda/mma/forward_launch.h"
#include "cuda/sm80/target.h"

namespace tessera::cuda::sm80 {

Status run_forward(const PlanData& plan, const Tensors& tensors, void* workspace,
                   const Queue& queue) {
  if (plan.kernel.form != core::Form::decode) return mma::run_forward(plan, tensors, queue);
  Tensors read = tensors;
  if (skips_pages(plan.problem)) {
    if (Status s = keep_pages(plan, read, workspace, queue); !s) return s;
  }
  return mma::run_decode(plan, read, workspace, queue);
}

Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue) {
  return mma::run_backward(plan, tensors, workspace, queue);
}

}  // namespace tessera::cuda::sm80
