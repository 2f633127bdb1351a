// From a backward plan and tensors to its launches: rows are prepared, key blocks walk over them,
// and where these have not done so, dQ is finished.
#include <algorithm>

#include "cuda/maps.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/shape.h"
#include "cuda/sm90/target.h"
#include "plan/layout_gpu.h"

namespace tessera::cuda::sm90 {
namespace {

RowMemory row_memory_of(const PlanData& plan, const GpuBackwardLayout& layout) {
  return {layout.statistics, layout.dq, layout.blocks, static_cast<int>(plan.problem.num_heads),
          plan.kernel.block_m * plan.kernel.head_dim / kPieceFloats};
}

BackwardBiasParams make_bias_params(const Problem& p, const Tensors& t,
                                    const GpuBackwardLayout& layout) {
  BackwardBiasParams params;
  const std::int64_t sizes[] = {p.batch, p.num_heads, p.seqlen_q, p.seqlen_k};
  const core::BiasStrides from = strides_of(*p.bias, t.dbias);
  const std::int64_t strides[] = {from.batch, from.head, from.query, from.key};
  const bool stored[] = {p.bias->batch, p.bias->heads, p.bias->queries, p.bias->keys};
  for (int i = 0; i < 4; ++i) {
    params.sizes[i] = stored[i] ? sizes[i] : 1;
    params.strides[i] = strides[i];
  }
  params.dbias = t.dbias.data;
  params.dtype = p.bias->dtype;
  params.sums = shares_bias(p) ? layout.dbias : nullptr;
  return params;
}

/// Where the gradient of a score's bias goes.
void set_bias_gradient(BackwardParams& params, const Problem& p, const Tensors& t,
                       const GpuBackwardLayout& layout) {
  if (!p.bias || t.dbias.data == nullptr) return;
  const BackwardBiasParams bias = make_bias_params(p, t, layout);
  core::BiasStrides& to = params.dbias_strides;
  std::int64_t* const strides[] = {&to.batch, &to.head, &to.query, &to.key};
  params.dbias_adds = bias.sums != nullptr;
  params.dbias = params.dbias_adds ? bias.sums : bias.dbias;
  std::int64_t inner = 1;
  for (int i = 3; i >= 0; --i) {
    *strides[i] = !params.dbias_adds ? bias.strides[i] : bias.sizes[i] > 1 ? inner : 0;
    inner *= bias.sizes[i];
  }
}

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
  const Problem& p = plan.problem;
  if (plan.kernel.any_layout) {
    params.q_source = source_of(t.q);
    params.k_source = source_of(t.k);
    params.v_source = source_of(t.v);
    params.dout_source = source_of(t.dout);
  } else if (Status s = make_maps(params, plan, t); !s) {
    return s;
  }
  params.rows = row_memory_of(plan, layout);
  params.turns = layout.turns;
  params.in_order = adds_in_order(p);
  params.next_tile = layout.next_tile;
  params.dq = t.dq.data;
  params.dq_strides = strides_of(t.dq);
  params.dk = t.dk.data;
  params.dv = t.dv.data;
  params.dk_strides = strides_of(t.dk);
  params.dv_strides = strides_of(t.dv);
  set_problem(params, plan, t);
  set_bias_gradient(params, p, t, layout);
  params.heads = static_cast<int>(p.num_heads);
  params.group = static_cast<int>(p.group());
  params.workers = static_cast<int>(std::min<std::int64_t>(plan.work.count(), plan.device.threads));
  params.row_work = plan.work;
  params.row_work.heads = params.heads;
  params.row_work.section *= params.group;
  params.row_work.blocks = layout.blocks.per_sequence;
  return {};
}

BackwardRowParams make_row_params(const PlanData& plan, const Tensors& t,
                                  const GpuBackwardLayout& layout) {
  const Problem& p = plan.problem;
  BackwardRowParams params;
  params.rows = row_memory_of(plan, layout);
  params.o = source_of(t.saved_o);
  params.dout = source_of(t.dout);
  params.softmax_lse = t.saved_softmax_lse;
  params.dsoftmax_lse = t.dsoftmax_lse;
  params.lse_head = lse_head_of(p);
  params.dq = t.dq.data;
  params.dq_strides = strides_of(t.dq);
  params.sink = t.sink;
  params.sink_parts = p.sink && t.dsink != nullptr ? layout.sink_parts : nullptr;
  params.dsink = t.dsink;
  params.turns = layout.turns;
  params.next_tile = layout.next_tile;
  params.sequences = sequences_of(p, t);
  params.window = window_of(p);
  params.softmax_scale = plan.score.scale;
  params.batch = static_cast<int>(p.batch);
  params.heads = static_cast<int>(p.num_heads);
  params.first_stores = adds_in_order(p);
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.aligned = !plan.kernel.any_layout;
  return params;
}

Status launch(const Queue& queue, BackwardKernel kernel, std::int64_t blocks, const void* params) {
  return queue.launch_auxiliary(number_of(kernel), blocks, params);
}

/// The one of two kernels that takes rows of that type.
Status launch(const Queue& queue, Dtype dtype, BackwardKernel bf16, BackwardKernel f16,
              std::int64_t blocks, const void* params) {
  switch (dtype) {
    case Dtype::bf16: return launch(queue, bf16, blocks, params);
    case Dtype::f16: return launch(queue, f16, blocks, params);
    case Dtype::f32:
    case Dtype::e4m3:
    case Dtype::i8: break;
  }
  return Status::device("the rows of this type have no kernels");
}

}  // namespace

Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue) {
  const Problem& p = plan.problem;
  Workspace memory(workspace);
  const GpuBackwardLayout layout = layout_gpu_backward(memory, plan);
  BackwardParams params;
  if (Status s = make_params(params, plan, tensors, layout); !s) return s;
  const BackwardRowParams rows = make_row_params(plan, tensors, layout);
  const std::int64_t row_blocks = p.batch * layout.blocks.per_sequence * p.num_heads;
  const bool wants_bias = p.bias && tensors.dbias.data != nullptr && bias_elements(p) > 0;
  const BackwardBiasParams bias =
      wants_bias ? make_bias_params(p, tensors, layout) : BackwardBiasParams{};
  constexpr std::int64_t kMostBlocks = 4096;  // of a loop over elements
  const std::int64_t bias_blocks =
      std::min(kMostBlocks, core::ceil_div<std::int64_t>(bias.count(), kRowThreads));

  Status status;
  if (row_blocks > 0 || plan.work.count() > 0) {  // one block at least, which sets the counters
    status = launch(queue, p.dtype, BackwardKernel::prepare_bf16, BackwardKernel::prepare_f16,
                    std::max<std::int64_t>(row_blocks, 1), &rows);
  }
  if (status && wants_bias) status = launch(queue, BackwardKernel::begin_bias, bias_blocks, &bias);
  if (status && plan.work.count() > 0) {
    status = queue.launch(plan.kernel, params.workers, &params);
  }
  // Elsewhere the main kernel has made dQ from its sums.
  if (status && row_blocks > 0 && (splits_roles(plan.kernel) || plan.work.count() == 0)) {
    status = launch(queue, p.dtype, BackwardKernel::finish_bf16, BackwardKernel::finish_f16,
                    row_blocks, &rows);
  }
  if (status && bias.sums != nullptr) {
    status = launch(queue, BackwardKernel::finish_bias, bias_blocks, &bias);
  }
  if (status && p.sink && tensors.dsink != nullptr) {
    status = launch(queue, BackwardKernel::sum_sinks, p.num_heads, &rows);
  }
  return status;
}

}  // namespace tessera::cuda::sm90
