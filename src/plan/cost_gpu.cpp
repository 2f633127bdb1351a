// What a GPU's row costs, by the numbers of its architecture.
#include <cmath>

#include "core/mma_shape.h"
#include "core/storage.h"
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

/// Blocks of rows of a sequence's heads that share tiles. Of packed queries the average: the
/// longest sequence may be the only one of its kind.
double blocks_of(const PlanData& plan, const Problem& p) {
  const int block_m = plan.kernel.block_m;
  const std::int64_t most = core::ceil_div<std::int64_t>(p.seqlen_q * plan.row_heads, block_m);
  if (!p.packed || !p.cache || p.batch == 0) return static_cast<double>(most);
  const std::int64_t rows = p.total_q * plan.row_heads / p.batch;
  return static_cast<double>(core::min(most, rows / block_m + 1));
}

/// Tiles of a multiprocessor, less than 1 where some have none. Nobody shares one, but decoding
/// rows share out their keys: it decides between the two, where both take a cache, and between
/// tiles of many rows and of few. Not by the batch (S9), nor elsewhere: then as many as one has at
/// once.
double tiles_of_each(const PlanData& plan, const Problem& p, double many) {
  const core::Kernel& row = plan.kernel;
  if (p.batch_invariant || row.form == core::Form::decode) return many;
  const bool counted = row.pass == Pass::forward && row.stages == 0 && row.cluster == 1;
  if (!p.cache && !counted) return many;
  const double tiles = blocks_of(plan, p) * static_cast<double>(p.batch) * plan.work.heads;
  return core::max(tiles, 1.0) / plan.device.threads;
}

/// What the last round of tiles of a row that exchanges leaves idle. Of few rounds it takes no
/// part: pieces of other rows share keys then.
double of_rounds(const PlanData& plan) {
  constexpr double kLeast = 4.0, kFew = 2.0;
  const double rounds = static_cast<double>(plan.work.count()) /
                        static_cast<double>(resident_blocks(plan.kernel, plan.device));
  return rounds >= kLeast ? std::ceil(rounds) / rounds : kFew;
}

/// How often decoding blocks of rows that have the same keys read them from memory: those that are
/// under way at once do so together.
double reads_of(const PlanData& plan, const Problem& p, int fitting) {
  const double blocks = blocks_of(plan, p);
  const double items = blocks * static_cast<double>(p.batch) * plan.work.heads;
  return core::min(blocks, core::max(1.0, std::ceil(items / (plan.device.threads * fitting))));
}

/// Of a query head: its share of what values are laid out by, once for its group.
double lay_cost(const PlanData& plan, const Problem& p, const GpuCosts& costs) {
  if (!lays_values(plan)) return 0.0;
  const core::ValueTiles tiles = {plan.kernel.head_dim_v};
  const double bytes =
      static_cast<double>(p.seqlen_k) * static_cast<double>(p.head_dim_v + tiles.rows());
  return bytes / (costs.moved * static_cast<double>(core::max<std::int64_t>(p.group(), 1)));
}

}  // namespace

namespace {

constexpr int kFewKeys = 128;  ///< GpuCosts::alone
constexpr int kUnits = 4;      ///< of a multiprocessor, with warps of their own

/// What a tile of few rows multiplies: warps without rows do nothing, but units wait for each
/// other. Told only of caches, where decoding is the other choice.
double used_share(const PlanData& plan, const Problem& p) {
  const core::Kernel& row = plan.kernel;
  if (!p.cache || row.pass == Pass::backward) return 1.0;
  const std::int64_t rows = core::min<std::int64_t>(p.seqlen_q * plan.row_heads, row.block_m);
  const std::int64_t warps = core::ceil_div<std::int64_t>(rows, row.tile_m) * core::mma_parts(row);
  const auto of_unit = [](std::int64_t all) {
    return static_cast<double>(
        core::ceil_div<std::int64_t>(core::max<std::int64_t>(all, 1), kUnits));
  };
  return of_unit(warps) / of_unit(core::mma_threads(row) / 32);
}

/// A tile of a row by mma.sync. A multiprocessor has several blocks at once, whose warps multiply
/// while others wait: what it takes is shared out among them.
double mma_piece_cost(const PlanData& plan, const MmaCosts& costs, double steps) {
  const core::Kernel& row = plan.kernel;
  const Problem& p = plan.problem;
  const bool much = costs.much_memory > 0 && plan.device.l1_bytes >= costs.much_memory;
  const double pairs = static_cast<double>(row.block_m) * row.block_n;
  const double most = core::mma_blocks(row, plan.device.l1_bytes);
  const double blocks = core::min(most, core::max(1.0, tiles_of_each(plan, compared(plan), most)));
  const bool paged = p.cache && p.cache->paged();
  const bool backward = row.pass == Pass::backward, shares = core::mma_parts(row) > 1;
  // Products: S and O; or S, dP, dV, dK and dQ, from scores to sums one after another.
  const int multiplied =
      backward ? 3 * row.head_dim + 2 * row.head_dim_v : row.head_dim + row.head_dim_v;
  const double multiply = pairs * multiplied / (costs.multiply_adds * (much ? 2.0 : 1.0)) *
                          (much && row.tile_m == 16 ? costs.waiting : 1.0) *
                          (blocks > 1.0 ? 1.0 : costs.alone) * (shares ? costs.shared : 1.0) *
                          used_share(plan, compared(plan));
  const double warps = core::max(1.0, core::mma_threads(row) / 32.0 / kUnits);
  const double alone =
      multiply / warps + (backward ? 2.0 : 1.0) * (paged ? costs.paged_latency : costs.latency);
  const double step = core::max(multiply, alone / blocks) *
                      (row.extra == core::Extra::none      ? 1.0
                       : row.extra == core::Extra::softcap ? costs.softcap
                                                           : costs.extras) *
                      (row.any_layout ? costs.any_layout : 1.0);
  return steps * step + (shares ? costs.shared_tile : costs.tile) / blocks;
}

/// A tile of a row whose queries, keys and values have 8 bits.
double eight_bit_piece_cost(const PlanData& plan, const GpuCosts& costs, double steps) {
  const core::Kernel& row = plan.kernel;
  const double pairs = static_cast<double>(row.block_m) * row.block_n;
  const double step = pairs * (row.head_dim + row.head_dim_v) / costs.eight_bit_multiply_adds +
                      costs.eight_bit_step;
  const double tile_row =
      crowded(row, costs) ? costs.eight_bit_crowded_tile_row : costs.eight_bit_tile_row;
  return steps * step + tile_row * row.block_m;
}

}  // namespace

double gpu_piece_cost(const PlanData& plan, const GpuCosts& costs, double steps) {
  const core::Kernel& row = plan.kernel;
  if (row.form == core::Form::tile && row.stages > 0) return mma_piece_cost(plan, costs.mma, steps);
  if (row.form == core::Form::decode) {
    if (row.qv) return steps * (costs.latent_step + costs.latent_row * row.block_m);
    const bool again = plan.work.blocks > 1;
    // Where little memory has room for fewer blocks a multiprocessor, each of them waits, if less.
    const int fitting = core::max(1, core::mma_blocks(row, plan.device.l1_bytes));
    const double fewer = fitting < row.blocks ? 0.85 * row.blocks / fitting : 1.0;
    const int passes = core::value_passes(row, static_cast<int>(plan.problem.head_dim_v));
    if (!again) return steps * passes * costs.decode_step;
    const int columns = core::decode_columns(row) + core::decode_value_columns(row);
    const double multiply = fewer * (costs.decode_again + costs.decode_column * columns);
    const Problem p = compared(plan);
    // How many read at once is decided by the batch (S9).
    if (costs.decode_read == 0.0 || p.batch_invariant) return steps * passes * multiply;
    const double bytes =
        static_cast<double>(row.block_n) * core::cached_size(row) * (row.head_dim + row.head_dim_v);
    const double reads = reads_of(plan, p, fitting) / core::max(1.0, blocks_of(plan, p));
    return steps * passes * core::max(multiply, bytes / costs.decode_read * reads);
  }
  if (row.operand == core::Operand::e4m3) return eight_bit_piece_cost(plan, costs, steps);
  const std::int64_t rows = compared(plan).seqlen_q * plan.row_heads;
  const bool is_crowded = crowded(row, costs);
  const double pairs = static_cast<double>(row.block_m) * row.block_n;
  // Scores of 8 bits, twice as many at a time.
  const double at_a_time = is_scaled(core::score_dtype_of(row.operand)) ? 2.0 : 1.0;
  const double multiplied = row.head_dim / at_a_time + row.head_dim_v;
  const double ease = !is_crowded             ? 1.0
                      : rows < costs.few_rows ? costs.crowded_of_few
                                              : costs.crowded;
  // At the row's own head dims and on whole tiles, of all blocks of threads that share them.
  const double multiply =
      ease * (pairs * multiplied / costs.multiply_adds + costs.step * row.cluster);
  const double latency = (splits_roles(row) ? costs.latency_of_roles : costs.latency) * row.cluster;
  // Of two that wait for latencies, the one that multiplies less.
  const double step = (core::max(multiply, latency) + 0.01 * multiply) *
                      (row.extra == core::Extra::all ? costs.extras : 1.0) *
                      (row.any_layout ? costs.any_layout : 1.0) *
                      (exchanges(row) ? costs.exchanged : 1.0);
  const bool waits = row.pass == Pass::forward && row.q_stages == 1;
  // From its queries to its results a tile of few keys does all one after another.
  const bool alone = row.pass == Pass::forward && !is_crowded && steps * row.block_n <= kFewKeys;
  const double between = (is_crowded ? costs.crowded_tile_row : costs.tile_row) * row.block_m +
                         (waits ? costs.wait * row.cluster : 0.0) + (alone ? costs.alone : 0.0);
  return steps * (waits ? costs.waiting_step : 1.0) * step + between;
}

double gpu_cost(const PlanData& plan, const GpuCosts& costs) {
  const Problem p = compared(plan);
  const core::Kernel& row = plan.kernel;
  if (p.seqlen_q == 0) return 0;
  const double blocks = blocks_of(plan, p);
  double keys = static_cast<double>(visible_pairs(p)) / static_cast<double>(p.seqlen_q);
  if (p.window_left >= 0 || p.window_right >= 0) {
    // Half a block; and of rows half a warpgroup's, more where the tile's others wait for it.
    const double waiting = crowded(row, costs) ? 1.0 : 0.5;
    // Where a block of rows may be those of several sequences, as many as a warp has.
    const int rows = row.prefixes ? row.tile_m : row.block_m;
    keys += 0.5 * (waiting * rows / plan.row_heads + row.block_n);
  } else {
    keys = static_cast<double>(core::round_up<std::int64_t>(p.seqlen_k, row.block_n));
  }
  const double tiles = blocks / plan.row_heads;
  // How many keys are shared is not known here; a row that finds out is taken to save half.
  const double read = row.prefixes ? 0.5 : 1.0;
  const double idle =
      exchanges(row) ? of_rounds(plan) : core::max(1.0, 1.0 / tiles_of_each(plan, p, 1.0));
  return tiles * gpu_piece_cost(plan, costs, keys / row.block_n) * read * idle +
         lay_cost(plan, p, costs) + 1000.0;
}

}  // namespace tessera
