// From a plan that decodes and tensors to launches: the kernel, and the merge of its parts.
#include "cuda/mma/decode_launch.h"

#include "cuda/combine.h"
#include "cuda/maps.h"
#include "cuda/mma/decode_params.h"
#include "plan/alignment.h"
#include "plan/layout.h"

namespace tessera::cuda::mma {
namespace {

DecodeParams make_params(const PlanData& plan, const Tensors& t, const SplitLayout& parts) {
  const Problem& p = plan.problem;
  DecodeParams params;
  params.q = source_of(t.q);
  params.k = source_of(t.k);
  params.v = source_of(t.v);
  set_forward(params, plan, t);
  params.split_n = plan.split_n;
  params.part_o = parts.o;
  params.part_lse = parts.lse;
  params.part_rows = p.rows_q() * p.num_heads;
  params.num_heads = static_cast<int>(p.num_heads);
  params.group = static_cast<int>(p.group());
  return params;
}

/// The parts of a plan with splits, and where their merge goes.
PartialResults results_of(const PlanData& plan) {
  const Problem& p = plan.problem;
  PartialResults results;
  results.dtype = Dtype::f32;
  results.dtype_o = p.dtype;
  results.num_splits = plan.work.splits;
  results.batch = p.packed ? 1 : p.batch;
  results.seqlen_q = p.packed ? p.total_q : p.seqlen_q;
  results.num_heads = p.num_heads;
  results.head_dim_v = p.head_dim_v;
  return results;
}
PartialTensors tensors_of(const PlanData& plan, const Tensors& t, const SplitLayout& parts) {
  const Problem& p = plan.problem;
  const PartialResults results = results_of(plan);
  const std::int64_t heads = p.num_heads, rows = results.rows();
  PartialTensors tensors;
  tensors.o_parts = {parts.o, rows * p.head_dim_v, results.seqlen_q * heads * p.head_dim_v,
                     heads * p.head_dim_v, p.head_dim_v};
  tensors.lse_parts = {parts.lse, rows, results.seqlen_q * heads, heads, 1};
  tensors.o = t.o;
  tensors.softmax_lse = {t.softmax_lse, heads * results.seqlen_q, 1, results.seqlen_q};
  return tensors;
}

Status check_all(const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  Status status = check_aligned("q", t.q, p, true);
  if (status) status = check_aligned("k", t.k, p, false);
  if (status) status = check_aligned("v", t.v, p, false);
  if (status) status = check_aligned("o", t.o, p, true);
  return status;
}

}  // namespace

Status run_decode(const PlanData& plan, const Tensors& tensors, void* workspace,
                  std::size_t combine_kernel, const Queue& queue) {
  if (plan.work.count() == 0) return {};
  if (Status s = check_all(plan, tensors); !s) return s;
  Workspace memory(workspace);
  const SplitLayout parts = layout_splits(memory, plan);
  const DecodeParams params = make_params(plan, tensors, parts);
  if (Status s = queue.launch(plan.kernel, plan.work.count(), &params); !s) return s;
  if (plan.work.splits <= 1) return {};
  return combine(results_of(plan), tensors_of(plan, tensors, parts), combine_kernel, queue);
}

}  // namespace tessera::cuda::mma
