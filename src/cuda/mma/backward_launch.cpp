// From a backward plan and tensors to its launches.
#include "cuda/mma/backward_launch.h"

#include <algorithm>

#include "cuda/backward.h"
#include "cuda/maps.h"
#include "cuda/mma/backward_params.h"
#include "plan/alignment.h"
#include "plan/shape.h"

namespace tessera::cuda::mma {
namespace {

Status check_backward_rows(const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  if (plan.kernel.any_layout) return {};
  const struct {
    const char* name;
    ConstTensor tensor;
    bool queries;
  } all[] = {{"q", t.q, true},       {"k", t.k, false},      {"v", t.v, false},
             {"dout", t.dout, true}, {"o", t.saved_o, true}, {"dq", t.dq, true},
             {"dk", t.dk, false},    {"dv", t.dv, false}};
  for (const auto& one : all) {
    if (Status s = check_aligned(one.name, one.tensor, p, p.dtype, one.queries); !s) return s;
  }
  return {};
}

}  // namespace

Status run_rows(const PlanData& plan, const Tensors& tensors, void* workspace, const Queue& queue,
                const FinishKernels& finish) {
  if (Status s = check_backward_rows(plan, tensors); !s) return s;
  Workspace memory(workspace);
  const GpuBackwardLayout layout = layout_gpu_backward(memory, plan);
  BackwardParams params;
  const RowSizes queries = row_sizes(plan.problem, true), keys = row_sizes(plan.problem, false);
  params.q = source_between(tensors.q, queries);
  params.k = source_between(tensors.k, keys);
  params.v = source_between(tensors.v, keys);
  params.dout = source_between(tensors.dout, queries);
  set_backward(params, plan, tensors, layout);
  return run_around(plan, tensors, layout, queue, true, finish, [&] {
    const std::int64_t blocks =
        std::min<std::int64_t>(plan.work.count(), resident_blocks(plan.kernel, plan.device));
    return queue.launch(plan.kernel, blocks, &params);
  });
}

Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue) {
  return run_rows(plan, tensors, workspace, queue, kFinishRows);
}

}  // namespace tessera::cuda::mma
