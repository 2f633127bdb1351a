// What memory a plan needs on each kind of device. The planner counts with these functions and the
// kernels take their pointers from the same ones, so a size is written once. Sizes are in elements.
#pragma once

#include "plan/layout_cpu.h"
#include "plan/layout_gpu.h"
#include "plan/layout_pages.h"

namespace tessera {

/// The whole workspace of a plan: what is shared, then one scratch for every worker that can have
/// work.
struct PlanLayout {
  KeptPagesLayout kept_pages;
  SplitLayout splits;       ///< forward
  BackwardLayout backward;  ///< backward
  GpuBackwardLayout gpu_backward;
  GpuForwardLayout gpu_forward;
  GpuDecodeLayout gpu_decode;
  GpuValueLayout gpu_values;
  std::byte* workers = nullptr;  ///< scratch of worker w starts at workers + w * worker_bytes
  std::int64_t worker_bytes = 0;
};

inline PlanLayout layout(Workspace& workspace, const PlanData& plan) {
  PlanLayout result;
  result.kept_pages = layout_kept_pages(workspace, plan);
  if (is_gpu(plan.kernel.arch)) {
    // Shared memory and registers are all that most of the forward needs.
    if (plan.problem.pass == Pass::backward) {
      result.gpu_backward = layout_gpu_backward(workspace, plan);
    } else if (plan.kernel.form == core::Form::decode) {
      result.gpu_decode = layout_gpu_decode(workspace, plan);
    } else {
      if (lays_values(plan)) result.gpu_values = layout_gpu_values(workspace, plan);
      result.gpu_forward = layout_gpu_forward(workspace, plan);
    }
    return result;
  }
  if (plan.problem.pass == Pass::backward) {
    result.backward = layout_backward(workspace, plan);
  } else {
    result.splits = layout_splits(workspace, plan);
  }
  result.worker_bytes = scratch_bytes(plan);
  result.workers = workspace.take<std::byte>("workers", result.worker_bytes * workers_of(plan));
  return result;
}

}  // namespace tessera
