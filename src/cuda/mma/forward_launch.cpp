// From a forward plan and tensors to a launch.
#include "cuda/mma/forward_launch.h"

#include <algorithm>
#include <bit>

#include "cuda/maps.h"
#include "cuda/mma/forward_params.h"
#include "plan/alignment.h"
#include "plan/shape.h"

namespace tessera::cuda::mma {
namespace {

Status check_rows(const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  if (plan.kernel.any_layout) return {};
  Status status = check_aligned("q", t.q, p, p.dtype, true);
  if (status) status = check_aligned("k", t.k, p, p.dtype, false);
  if (status) status = check_aligned("v", t.v, p, p.dtype, false);
  if (status) status = check_aligned("o", t.o, p, p.dtype, true);
  return status;
}

}  // namespace

Status run_tiles(const PlanData& plan, const Tensors& tensors, const Queue& queue) {
  if (plan.work.count() == 0) return {};
  if (Status s = check_rows(plan, tensors); !s) return s;
  ForwardParams params;
  const RowSizes queries = row_sizes(plan.problem, true), keys = row_sizes(plan.problem, false);
  params.q = source_between(tensors.q, queries);
  params.k = source_between(tensors.k, keys);
  params.v = source_between(tensors.v, keys);
  set_forward(params, plan, tensors);
  params.page_size = core::Divisor(params.cache.pages.size);
  params.alike = params.k.strides == params.v.strides;
  if (plan.score.capped) params.series = core::make_softcap_series(plan.score);
  params.rows.shift = std::countr_zero(static_cast<unsigned>(plan.row_heads));
  params.group = static_cast<int>(plan.problem.group() / plan.row_heads);
  const std::int64_t blocks =
      std::min<std::int64_t>(plan.work.count(), resident_blocks(plan.kernel, plan.device));
  return queue.launch(plan.kernel, blocks, &params);
}

}  // namespace tessera::cuda::mma
