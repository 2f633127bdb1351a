// From a forward plan and tensors to a launch: parameters and tensor maps.
#include <algorithm>
#include <bit>
#include <limits>

#include "cuda/keep_pages.h"
#include "cuda/lay_values.h"
#include "cuda/maps.h"
#include "cuda/mma/decode_launch.h"
#include "cuda/mma/forward_launch.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/sm90/shape.h"
#include "cuda/sm90/target.h"
#include "plan/layout.h"
#include "plan/shape.h"

namespace tessera::cuda::sm90 {
namespace {

Status make_maps(ForwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  const std::int64_t d = p.head_dim, dv = p.head_dim_v;
  int keys = row.block_n;
  if (p.cache && p.cache->paged()) {
    keys = core::box_keys(static_cast<int>(p.cache->page_size), row.block_n, p.cache->leftpad);
    params.box_keys = keys = keys < kLeastBox ? 1 : keys;
  }
  Status status = make_map(params.q, "q", t.q, p, p.dtype, true, d, row.q_rows, plan.row_heads);
  if (status) status = make_map(params.k, "k", t.k, p, p.dtype, false, d, keys, 1);
  if (status && is_eight_bit(row)) status = check_tiles(t.v, p);
  if (status && !is_eight_bit(row)) {
    status = make_map(params.v, "v", t.v, p, p.stored_v(), false, dv, keys, 1);
  }
  if (status) status = check_aligned("o", t.o, p, p.stored_o(), true);
  if (status && stages_rows(row) && plan.row_heads <= kStagedRows) {
    params.o_in_boxes =
        make_map(params.o_map, "o", t.o, p, p.stored_o(), true, dv, kStagedRows, plan.row_heads)
            .ok();
  }
  return status;
}

/// What 8 bits need besides (S14).
void set_scales(ForwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  params.q_scale = q_scales_of(p, t);
  params.k_scale = k_scales_of(p, t);
  params.v_scale = v_scales_of(p, t);
  params.score_shift = score_shift_of(p, t);
  params.v_shift = v_shift_of(p, t);
  // Without blocks all keys have the first one's.
  const auto block_k = static_cast<int>(p.scales.block_k);
  params.k_scale_block = core::Divisor(block_k > 0 ? block_k : std::numeric_limits<int>::max());
  params.v_scale_block = core::Divisor(static_cast<int>(p.scales.block_v));
  params.o_is_f16 = p.stored_o() == Dtype::f16;
  const bool by_block = p.scales.v == Scaling::block;
  params.promotion = core::promoted_blocks(plan.kernel, by_block ? p.scales.block_v : 0) - 1;
}

Status make_params(ForwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  params.q_source = source_of(t.q);
  params.k_source = source_of(t.k);
  params.v_source = source_of(t.v);
  if (!row.any_layout) {
    if (Status s = make_maps(params, plan, t); !s) return s;
  }
  set_forward(params, plan, t);
  params.page_size = core::Divisor(params.cache.pages.size);
  params.strangers = p.packed || p.cache;
  if (has_scales(row)) set_scales(params, plan, t);
  if (plan.score.capped) params.series = core::make_softcap_series(plan.score);
  params.rows.shift = std::countr_zero(static_cast<unsigned>(plan.row_heads));
  params.group = core::Divisor(static_cast<int>(p.group() / plan.row_heads));
  return {};
}

}  // namespace

Status run_forward(const PlanData& plan, const Tensors& tensors, void* workspace,
                   const Queue& queue) {
  Tensors read = tensors;
  if (lists_pages(plan)) {
    if (Status s = keep_pages(plan, read, workspace, queue); !s) return s;
  }
  if (plan.kernel.form == core::Form::decode) {
    return mma::run_decode(plan, read, workspace, queue);
  }
  if (plan.kernel.stages > 0) return mma::run_tiles(plan, read, queue);
  if (plan.work.count() == 0) return {};
  if (lays_values(plan)) {
    if (Status s = lay_values(plan, read, workspace, queue); !s) return s;
  }
  ForwardParams params;
  if (Status s = make_params(params, plan, read); !s) return s;
  if (hands_out_tiles(plan)) {
    Workspace memory(workspace);
    params.next_tile = layout(memory, plan).gpu_forward.next_tile;
    if (Status s = queue.clear(params.next_tile); !s) return s;
  }
  const std::int64_t tiles = std::min(plan.work.count(), resident_blocks(plan.kernel, plan.device));
  return queue.launch(plan.kernel, tiles * plan.kernel.cluster, &params);
}

}  // namespace tessera::cuda::sm90
