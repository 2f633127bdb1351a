// What a GPU's row costs, by the numbers of its architecture.
#include "plan/cost.h"
#include "plan/shape.h"

namespace tessera {

namespace {

/// Larger tiles at larger head dims: GpuCosts.
bool crowded(const core::Kernel& row, const GpuCosts& costs) {
  return row.pass == Pass::forward && row.block_m > costs.uncrowded_rows &&
         row.head_dim > costs.uncrowded_dim;
}

/// The longest sequence of the batch must not decide (S9).
Problem compared(const PlanData& plan) {
  Problem p = plan.problem;
  if (p.packed && p.batch_invariant) p.seqlen_q = p.seqlen_k = 4096;
  return p;
}

}  // namespace

double gpu_piece_cost(const PlanData& plan, const GpuCosts& costs, double steps) {
  const core::Kernel& row = plan.kernel;
  if (row.form == core::Form::decode) return steps * costs.decode_step;
  const std::int64_t rows = compared(plan).seqlen_q * plan.row_heads;
  const bool is_crowded = crowded(row, costs);
  const double pairs = static_cast<double>(row.block_m) * row.block_n;
  const double ease = !is_crowded             ? 1.0
                      : rows < costs.few_rows ? costs.crowded_of_few
                                              : costs.crowded;
  // At the row's own head dims and on whole tiles.
  const double multiply =
      ease * (pairs * (row.head_dim + row.head_dim_v) / costs.multiply_adds + costs.step);
  const double latency = splits_roles(row) ? costs.latency_of_roles : costs.latency;
  // Of two that wait for latencies, the one that multiplies less.
  const double step = (core::max(multiply, latency) + 0.01 * multiply) *
                      (row.extra == core::Extra::all ? costs.extras : 1.0) *
                      (row.any_layout ? costs.any_layout : 1.0);
  const bool waits = row.pass == Pass::forward && row.q_stages == 1;
  const double between = (is_crowded ? costs.crowded_tile_row : costs.tile_row) * row.block_m +
                         (waits ? costs.wait : 0.0);
  return steps * (waits ? costs.waiting_step : 1.0) * step + between;
}

double gpu_cost(const PlanData& plan, const GpuCosts& costs) {
  const Problem p = compared(plan);
  const core::Kernel& row = plan.kernel;
  if (p.seqlen_q == 0) return 0;
  const std::int64_t rows = p.seqlen_q * plan.row_heads;
  const double tiles =
      static_cast<double>(core::ceil_div<std::int64_t>(rows, row.block_m)) / plan.row_heads;
  double keys = static_cast<double>(visible_pairs(p)) / static_cast<double>(p.seqlen_q);
  if (p.window_left >= 0 || p.window_right >= 0) {
    // Half a block; and of rows half a warpgroup's, more where the tile's others wait for it.
    const double waiting = crowded(row, costs) ? 1.0 : 0.5;
    keys += 0.5 * (waiting * row.block_m / plan.row_heads + row.block_n);
  } else {
    keys = static_cast<double>(core::round_up<std::int64_t>(p.seqlen_k, row.block_n));
  }
  return tiles * gpu_piece_cost(plan, costs, keys / row.block_n) + 1000.0;
}

}  // namespace tessera
