// From a backward plan and tensors to its launches.
#include <algorithm>

#include "cuda/backward.h"
#include "cuda/maps.h"
#include "cuda/mma/backward_launch.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/shape.h"
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
  if (status) status = make_map(params.k, "k", t.k, p, p.dtype, false, d, own_keys(row), 1);
  if (status) status = make_map(params.v, "v", t.v, p, p.dtype, false, dv, own_keys(row), 1);
  if (status) status = make_map(params.dout, "dout", t.dout, p, p.dtype, true, dv, row.block_m, 1);
  return status;
}

KeySums key_sums_of(const PlanData& plan, const GpuBackwardLayout& layout) {
  const core::Kernel& row = plan.kernel;
  const int rows = row.block_n / 64;
  return {plan.work.splits > 1 ? layout.key_sums : nullptr,
          plan.work.heads,
          plan.work.blocks,
          plan.work.splits,
          rows * core::ceil_div(row.head_dim, 64) + rows * core::ceil_div(row.head_dim_v, 64),
          rows * core::ceil_div(row.head_dim_v, 64)};
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
  // Query heads of a section: a split of a key head has its share of them.
  params.row_work.section =
      std::max<std::int64_t>(1, plan.work.section * params.group / plan.work.splits);
  params.row_work.blocks = layout.blocks.per_sequence;
  params.row_work.splits = 1;
  params.row_work.early = 0;
  params.key_sums = key_sums_of(plan, layout);
  return {};
}

FinishKeysParams make_finish_params(const BackwardParams& main, const PlanData& plan) {
  FinishKeysParams params;
  params.sums = main.key_sums;
  params.sequences = main.sequences;
  params.dk = main.dk;
  params.dv = main.dv;
  params.dk_strides = main.dk_strides;
  params.dv_strides = main.dv_strides;
  params.block_n = plan.kernel.block_n;
  params.head_dim = main.head_dim;
  params.head_dim_v = main.head_dim_v;
  params.softmax_scale = plan.score.scale;
  params.aligned = !plan.kernel.any_layout;
  return params;
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
  return run_around(plan, tensors, layout, queue, splits_roles(plan.kernel), kFinishRows, [&] {
    Status status = queue.launch(plan.kernel, params.workers, &params);
    if (!status || params.key_sums.data == nullptr) return status;
    const FinishKeysParams finish = make_finish_params(params, plan);
    const std::int64_t blocks = plan.work.count() / plan.work.splits * params.key_sums.pieces;
    return launch_finish(queue, plan.problem.dtype, kFinishKeys, blocks, &finish);
  });
}

}  // namespace tessera::cuda::sm90
