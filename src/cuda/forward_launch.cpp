// From a forward plan and tensors to a launch: parameters and tensor maps.
#include <algorithm>
#include <bit>
#include <string>

#include "cuda/launch.h"
#include "cuda/maps.h"
#include "cuda/sm90/params.h"

namespace tessera::cuda {
namespace {

Status make_maps(sm90::ForwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  const std::int64_t d = p.head_dim, dv = p.head_dim_v;
  Status status = make_map(params.q, "q", t.q, p, true, d, row.block_m, plan.packed_heads);
  if (status) status = make_map(params.k, "k", t.k, p, false, d, row.block_n, 1);
  if (status) status = make_map(params.v, "v", t.v, p, false, dv, row.block_n, 1);
  if (!status) return status;
  const auto unaligned = [](std::int64_t stride, std::int64_t size) {
    return size > 1 && stride % 8 != 0;
  };
  if (reinterpret_cast<std::uintptr_t>(t.o.data) % 16 != 0 ||
      unaligned(t.o.stride_seqlen, p.seqlen_q) || unaligned(t.o.stride_head, p.num_heads) ||
      unaligned(t.o.stride_batch, p.packed ? 1 : p.batch)) {
    return Status::invalid(std::string("o: must be aligned to 16 bytes, its strides multiples of 8 "
                                       "elements") +
                           kOrUnaligned);
  }
  return {};
}

sm90::Source source_of(const ConstTensor& tensor, const Problem& p) {
  return {tensor.data,
          {p.packed ? 0 : tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head}};
}

Status make_params(sm90::ForwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  if (row.any_layout) {
    params.q_source = source_of(t.q, p);
    params.k_source = source_of(t.k, p);
    params.v_source = source_of(t.v, p);
  } else if (Status s = make_maps(params, plan, t); !s) {
    return s;
  }
  params.o = t.o.data;
  params.o_strides = {p.packed ? 0 : t.o.stride_batch, t.o.stride_seqlen, t.o.stride_head};
  params.softmax_lse = t.softmax_lse;
  params.cu_seqlens_q = p.packed ? t.cu_seqlens_q : nullptr;
  params.cu_seqlens_k = p.packed ? t.cu_seqlens_k : nullptr;
  params.alibi_slopes = p.alibi == PerHead::none ? nullptr : t.alibi_slopes;
  params.alibi_per_batch = p.alibi == PerHead::batch_heads;
  params.sink = p.sink ? t.sink : nullptr;
  if (p.bias) {
    params.bias = t.bias.data;
    params.bias_dtype = p.bias->dtype;
    params.bias_batch = p.bias->batch ? t.bias.stride_batch : 0;
    params.bias_head = p.bias->heads ? t.bias.stride_head : 0;
    params.bias_query = p.bias->queries ? t.bias.stride_query : 0;
    params.bias_key = p.bias->keys ? t.bias.stride_key : 0;
  }
  params.score = plan.score;
  if (plan.score.capped) params.series = core::make_softcap_series(plan.score);
  params.dropout = core::make_dropout(p.dropout_p, t.philox_seed, t.philox_offset);
  params.window_left = p.window_left;
  params.window_right = p.window_right;
  params.alignment = p.alignment;
  params.lse_head = p.packed ? p.total_q : p.seqlen_q;
  params.rows.shift = std::countr_zero(static_cast<unsigned>(plan.packed_heads));
  params.heads = static_cast<int>(p.num_heads / plan.packed_heads);
  params.group = static_cast<int>(p.group() / plan.packed_heads);
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.order = plan.order;
  return {};
}

}  // namespace

Status run_forward(const PlanData& plan, const Tensors& tensors, const Queue& queue) {
  if (plan.grid.count() == 0) return {};
  sm90::ForwardParams params;
  if (Status s = make_params(params, plan, tensors); !s) return s;
  return queue.launch(plan.kernel, std::min<std::int64_t>(plan.grid.count(), plan.device.threads),
                      &params);
}

}  // namespace tessera::cuda
