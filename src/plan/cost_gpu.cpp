// What a GPU's row costs.
#include "plan/cost.h"
#include "plan/shape.h"

namespace tessera {

/// Cycles of a multiprocessor for one query head. wgmma does 2048 multiply-adds a cycle, at the
/// row's own head dims and on whole tiles; but a step of a warpgroup, from its scores to its
/// weights, cannot be shorter than its chain of latencies. The constants fit the H200's choices.
/// Three warpgroups above head_dim 64 read keys and values two thirds as often, but have few
/// registers and more to do from tile to tile; and of few rows they make so few tiles that
/// multiprocessors stay idle. With one buffer of queries there is a wait from tile to tile, but a
/// step is 1 % shorter.
double gpu_cost(const PlanData& plan) {
  Problem p = plan.problem;
  // The longest sequence of the batch must not decide (S9).
  if (p.packed && p.batch_invariant) p.seqlen_q = p.seqlen_k = 4096;
  const core::Kernel& row = plan.kernel;
  if (p.seqlen_q == 0) return 0;
  const bool crowded = row.pass == Pass::forward && row.block_m > 128 && row.head_dim > 64;
  const std::int64_t rows = p.seqlen_q * plan.packed_heads;
  const double tiles =
      static_cast<double>(core::ceil_div<std::int64_t>(rows, row.block_m)) / plan.packed_heads;
  double keys = static_cast<double>(visible_pairs(p)) / static_cast<double>(p.seqlen_q);
  if (p.window_left >= 0 || p.window_right >= 0) {
    // Half a block; and of rows half a warpgroup's, more where the tile's others wait for it.
    const double waiting = crowded ? 1.0 : 0.5;
    keys += 0.5 * (waiting * row.block_m / plan.packed_heads + row.block_n);
  } else {
    keys = static_cast<double>(core::round_up<std::int64_t>(p.seqlen_k, row.block_n));
  }
  const double pairs = static_cast<double>(row.block_m) * row.block_n;
  const double ease = !crowded ? 1.0 : rows < 2048 ? 1.4 : 0.905;
  const double multiply = ease * (pairs * (row.head_dim + row.head_dim_v) / 2048.0 + 150.0);
  // Where the backward's warpgroups have roles, scores go through both of them.
  const double latency = splits_roles(row) ? 1600.0 : 1300.0;
  // Of two that wait for latencies, the one that multiplies less.
  const double step = (core::max(multiply, latency) + 0.01 * multiply) *
                      (row.extra == core::Extra::all ? 4.0 : 1.0) * (row.any_layout ? 4.0 : 1.0);
  const bool waits = row.pass == Pass::forward && row.q_stages == 1;
  const double between = (crowded ? 22.0 : 8.0) * row.block_m + (waits ? 1430.0 : 0.0);
  return tiles * (keys / row.block_n * (waits ? 0.99 : 1.0) * step + between) + 1000.0;
}

}  // namespace tessera
