// From a backward plan and tensors to its launches.
#include <algorithm>

#include "cuda/backward.h"
#include "cuda/maps.h"
#include "cuda/mma/backward_launch.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/target.h"
#include "plan/shape.h"

namespace tessera::cuda::sm90 {
namespace {

Status make_maps(BackwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  const std::int64_t d = p.head_dim, dv = p.head_dim_v;
  Status status = check_aligned("o", t.saved_o, p, p.dtype, true);
  if (status) status = check_aligned("dq", t.dq, p, p.dtype, true);
  if (status) status = check_aligned("dk", t.dk, p, p.dtype, false);
  if (status) status = check_aligned("dv", t.dv, p, p.dtype, false);
  if (status) status = make_map(params.q, "q", t.q, p, p.dtype, true, d, row.block_m, 1);
  if (status) status = make_map(params.k, "k", t.k, p, p.dtype, false, d, row.block_n, 1);
  if (status) status = make_map(params.v, "v", t.v, p, p.dtype, false, dv, row.block_n, 1);
  if (status) status = make_map(params.dout, "dout", t.dout, p, p.dtype, true, dv, row.block_m, 1);
  return status;
}

Status make_params(BackwardParams& params, const PlanData& plan, const Tensors& t,
                   const GpuBackwardLayout& layout) {
  if (plan.kernel.any_layout) {
    params.q_source = source_of(t.q);
    params.k_source = source_of(t.k);
    params.v_source = source_of(t.v);
    params.dout_source = source_of(t.dout);
  } else if (Status s = make_maps(params, plan, t); !s) {
    return s;
  }
  set_backward(params, plan, t, layout);
  params.dq = t.dq.data;
  params.dq_strides = strides_of(t.dq);
  const std::int64_t tiles = std::min(plan.work.count(), resident_blocks(plan.kernel, plan.device));
  params.workers = static_cast<int>(tiles) * plan.kernel.cluster;
  params.row_work = plan.work;
  params.row_work.heads = static_cast<int>(plan.problem.num_heads);
  params.row_work.section *= params.group;
  params.row_work.blocks = layout.blocks.per_sequence;
  return {};
}

}  // namespace

Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue) {
  if (plan.kernel.stages > 0) {
    return mma::run_rows(plan, tensors, workspace, queue, kFinishMmaRows);
  }
  Workspace memory(workspace);
  const GpuBackwardLayout layout = layout_gpu_backward(memory, plan);
  BackwardParams params;
  if (Status s = make_params(params, plan, tensors, layout); !s) return s;
  return run_around(plan, tensors, layout, queue, splits_roles(plan.kernel), kFinishRows,
                    [&] { return queue.launch(plan.kernel, params.workers, &params); });
}

}  // namespace tessera::cuda::sm90
