#include "cuda/backward.h"

#include <algorithm>

#include "cuda/aux/backward_rows_params.h"
#include "cuda/maps.h"

namespace tessera::cuda {
namespace {

RowMemory row_memory_of(const PlanData& plan, const GpuBackwardLayout& layout) {
  return {layout.statistics, layout.dq, layout.blocks, static_cast<int>(plan.problem.num_heads),
          plan.kernel.block_m * plan.kernel.head_dim};
}

aux::BackwardBiasParams make_bias_params(const Problem& p, const Tensors& t,
                                         const GpuBackwardLayout& layout) {
  aux::BackwardBiasParams params;
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
void set_bias_gradient(BackwardPass& params, const Problem& p, const Tensors& t,
                       const GpuBackwardLayout& layout) {
  if (!p.bias || t.dbias.data == nullptr) return;
  const aux::BackwardBiasParams bias = make_bias_params(p, t, layout);
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

aux::BackwardRowParams make_row_params(const PlanData& plan, const Tensors& t,
                                       const GpuBackwardLayout& layout) {
  const Problem& p = plan.problem;
  aux::BackwardRowParams params;
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
  params.first_stores = adds_in_order(plan);
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.aligned = !plan.kernel.any_layout;
  return params;
}

/// The one of two kernels that takes rows of that type.
template <class Kernel>
Status launch(const Queue& queue, Dtype dtype, Kernel bf16, Kernel f16, std::int64_t blocks,
              const void* params) {
  switch (dtype) {
    case Dtype::bf16: return queue.launch_auxiliary(number_of(bf16), blocks, params);
    case Dtype::f16: return queue.launch_auxiliary(number_of(f16), blocks, params);
    case Dtype::f32:
    case Dtype::e4m3:
    case Dtype::i8: break;
  }
  return Status::device("the rows of this type have no kernels");
}

}  // namespace

Status launch_finish(const Queue& queue, Dtype dtype, const FinishKernels& kernels,
                     std::int64_t blocks, const void* params) {
  return launch(queue, dtype, kernels.bf16, kernels.f16, blocks, params);
}

void set_backward(BackwardPass& params, const PlanData& plan, const Tensors& t,
                  const GpuBackwardLayout& layout) {
  const Problem& p = plan.problem;
  params.rows = row_memory_of(plan, layout);
  params.turns = layout.turns;
  params.in_order = adds_in_order(plan);
  params.next_tile = layout.next_tile;
  params.dk = t.dk.data;
  params.dv = t.dv.data;
  params.dk_strides = strides_of(t.dk);
  params.dv_strides = strides_of(t.dv);
  set_problem(params, plan, t);
  set_bias_gradient(params, p, t, layout);
  params.group = static_cast<int>(p.group());
}

Status run_around(const PlanData& plan, const Tensors& tensors, const GpuBackwardLayout& layout,
                  const Queue& queue, bool finishes, const FinishKernels& finish,
                  const std::function<Status()>& launch_main) {
  const Problem& p = plan.problem;
  const aux::BackwardRowParams rows = make_row_params(plan, tensors, layout);
  const std::int64_t row_blocks = p.batch * layout.blocks.per_sequence * p.num_heads;
  const bool wants_bias = p.bias && tensors.dbias.data != nullptr && bias_elements(p) > 0;
  const aux::BackwardBiasParams bias =
      wants_bias ? make_bias_params(p, tensors, layout) : aux::BackwardBiasParams{};
  constexpr std::int64_t kMostBlocks = 4096;  // of a loop over elements
  const std::int64_t bias_blocks =
      std::min(kMostBlocks, core::ceil_div<std::int64_t>(bias.count(), aux::kRowThreads));
  const auto launch_bias = [&](AuxiliaryKernel kernel) {
    return queue.launch_auxiliary(number_of(kernel), bias_blocks, &bias);
  };

  Status status;
  if (row_blocks > 0 || plan.work.count() > 0) {  // one block at least, which sets the counters
    status =
        launch(queue, p.dtype, AuxiliaryKernel::prepare_rows_bf16,
               AuxiliaryKernel::prepare_rows_f16, std::max<std::int64_t>(row_blocks, 1), &rows);
  }
  if (status && wants_bias) status = launch_bias(AuxiliaryKernel::begin_bias);
  if (status && plan.work.count() > 0) status = launch_main();
  if (status && row_blocks > 0 && (finishes || plan.work.count() == 0)) {
    status = launch_finish(queue, p.dtype, finish, row_blocks, &rows);
  }
  if (status && bias.sums != nullptr) status = launch_bias(AuxiliaryKernel::finish_bias);
  if (status && p.sink && tensors.dsink != nullptr) {
    status = queue.launch_auxiliary(number_of(AuxiliaryKernel::sum_sinks), p.num_heads, &rows);
  }
  return status;
}

}  // namespace tessera::cuda
