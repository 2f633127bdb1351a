// What a row makes of a problem: rows of an item, splits, pieces and their order, the workspace.
#include "plan/shape.h"

#include <numeric>

#include "core/mma_shape.h"
#include "plan/gpu_facts.h"
#include "plan/layout.h"
#include "plan/names.h"
#include "plan/select.h"

namespace tessera {

std::int64_t rows_per_head_k(const Problem& problem) { return problem.seqlen_q * problem.group(); }

std::int64_t resident_blocks(const core::Kernel& row, const Device& device) {
  return core::max<std::int64_t>(
      1, std::int64_t{device.threads} *
             (row.stages > 0 ? core::mma_blocks(row, device.l1_bytes) : row.blocks) / row.cluster);
}

std::int64_t visible_pairs(const Problem& p) {
  if (p.seqlen_q == 0 || p.seqlen_k == 0) return 0;
  const core::Band band =
      core::make_band(static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), p.window_left,
                      p.window_right, p.alignment);
  const std::int64_t samples = core::min<std::int64_t>(p.seqlen_q, 64);
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    sum += band.keys_of(static_cast<int>((2 * i + 1) * p.seqlen_q / (2 * samples))).size();
  }
  return static_cast<std::int64_t>(static_cast<double>(sum) / static_cast<double>(samples) *
                                   static_cast<double>(p.seqlen_q));
}

namespace {

/// Most keys that one block of rows can see, sink tokens among them.
std::int64_t longest_keys(const Problem& p, std::int64_t queries) {
  const core::Band band =
      core::make_band(static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), p.window_left,
                      p.window_right, p.alignment);
  const auto in_chunk = [&p](std::int64_t keys) {
    return p.chunk > 0 ? core::min(keys, p.chunk - 1) : keys;
  };
  return core::min(p.seqlen_k, in_chunk(band.left) + in_chunk(band.right) + queries +
                                   core::min(p.sink_tokens, p.seqlen_k));
}

/// Bytes of keys and values of all sequences, if so many a sequence are seen. To be read by people,
/// so it ends where 64 bits do.
std::int64_t bytes_of_keys(const Problem& p, std::int64_t longest) {
  double keys = static_cast<double>(p.batch) * static_cast<double>(longest);
  if (p.packed_k()) keys = core::min(keys, static_cast<double>(p.total_k));
  const double bytes =
      keys * static_cast<double>(p.num_heads_k) * static_cast<double>(key_and_value_bytes(p));
  return static_cast<std::int64_t>(core::min(bytes, 9e18));
}

/// The multiple of the greatest power of two that is at most 1/32 less. Batches and heads tend to
/// be such multiples, too: then items of one length are cut alike or not at all.
constexpr std::int64_t most_even(std::int64_t count) {
  std::int64_t power = 1;
  for (std::int64_t next = 2; (count / next * next) * 32 >= count * 31; next *= 2) power = next;
  return count / power * power;
}

/// Spans of a GPU's decoding row: hardly fewer than blocks are resident, so that none of them waits
/// for one that has not begun. An item's fixed part is what a block loses between two, in units; a
/// span of less than a few units would lose more than it computes. Where bits must not depend on
/// the batch (S9) units are large, and each is a part of its own.
void set_spans(PlanData& plan) {
  constexpr int kFixed = 1, kLeast = 2;
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  plan.unit_n = p.batch_invariant ? row.split_n : row.block_n;
  plan.spans.fixed = p.batch_invariant ? 0 : kFixed;
  // Of a sequence with prefixes: each row is merged with what it sees of them.
  if (row.prefixes) plan.spans.fixed += static_cast<int>(rows_per_head_k(p)) / 8;
  plan.spans.least = p.batch_invariant ? 1 : kLeast;
  const std::int64_t resident = most_even(resident_blocks(row, plan.device));
  plan.spans.count = static_cast<int>(
      core::max<std::int64_t>(1, core::min(resident, plan.work.count() * units_of_item(plan))));
}

/// Splits pay only where one block of rows faces many keys. A CPU's depend on nothing but the shape
/// of a sequence, never on threads or batch, so they change neither repeatability nor batch
/// invariance (S9).
int split_size(const core::Kernel& row, const Problem& p, std::int64_t longest) {
  if (is_gpu(row.arch)) return 0;
  if (row.split_n == 0 || row.pass != Pass::forward) return 0;
  if (rows_per_head_k(p) > row.block_m) return 0;
  if (p.packed && p.batch_invariant) return 0;
  return longest > row.split_n ? row.split_n : 0;
}

/// Rows of a forward item. A CPU's items are as long as their queries and outputs stay in the
/// second-level cache, which saves requests for keys and copies of them, but short enough that
/// every worker gets some. Only where the bits do not depend on it (S9): blocks of keys are counted
/// from an item's first key, which a window, a chunk or a split moves.
int rows_of_item(const core::Kernel& row, const Problem& p, int split_n, const Device& device) {
  if (is_gpu(row.arch) || row.pass != Pass::forward || row.form != core::Form::tile ||
      split_n != 0) {
    return row.block_m;
  }
  constexpr int kMostRows = 256, kLeastRows = 64;
  if (p.window_left >= 0 || p.chunk > 0) return core::min(row.block_m, kMostRows);
  const std::int64_t row_bytes = (p.score_dim() + p.head_dim_v) * 4;
  int rows = row.block_m;
  if (rows * row_bytes > device.l2_bytes / 2) rows = core::min(rows, kMostRows);
  const auto items = [&] {
    return p.batch * p.num_heads_k * core::ceil_div<std::int64_t>(rows_per_head_k(p), rows);
  };
  const bool unequal = p.window_right >= 0 || p.packed || p.cache;
  const std::int64_t wanted = std::int64_t{unequal ? 4 : 2} * device.threads;
  while (device.threads > 1 && rows > kLeastRows && items() < wanted) rows /= 2;
  return rows;
}

bool is_masked(const Problem& p) { return p.window_left >= 0 || p.window_right >= 0; }

/// Do a head's tiles take about as long, and go over the same keys, or rows: without a mask, or
/// where few queries at the end of many keys see nearly all of them?
bool tiles_are_alike(const Problem& p) {
  if (p.packed || p.window_left >= 0) return false;
  if (p.window_right < 0) return true;
  if (p.seqlen_q == 0) return false;
  const core::Band band =
      core::make_band(static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), p.window_left,
                      p.window_right, p.alignment);
  return band.keys_of(0).size() >= p.seqlen_k - p.seqlen_k / 8;
}

/// Do the query heads of a group share tiles of rows? On a GPU where that makes fewer tiles: few
/// queries leave most of a tile empty. What loads them then fetches boxes of group x queries.
bool shares_rows(const core::Kernel& row, const Problem& p) {
  if (!is_gpu(row.arch) || row.pass == Pass::backward || row.form == core::Form::decode)
    return true;
  const std::int64_t group = p.group();
  const bool power_of_two = group > 0 && (group & (group - 1)) == 0;
  const GpuFacts& facts = facts_of(row.arch);
  if (!facts.shares_rows) return false;
  if (group < 2 || group > row.tile_m || !power_of_two) return false;
  if (p.seqlen_q * group > std::int64_t{1} << facts.counted_bits) return false;
  if (row.extra == core::Extra::all || p.sink || (p.packed && p.batch_invariant)) return false;
  return core::ceil_div<std::int64_t>(p.seqlen_q * group, row.block_m) <
         core::ceil_div<std::int64_t>(p.seqlen_q, row.block_m) * group;
}

/// Heads of all sequences, and in a backward whose pieces share keys as many for each.
std::int64_t heads_of_pass(const PlanData& plan) {
  const std::int64_t each = core::shares_keys(plan.kernel) ? plan.work.splits : 1;
  return std::int64_t{plan.work.batch} * plan.work.heads * each;
}

/// Heads of which what tiles read again and again fits two thirds of the second-level cache: keys
/// and values, or, backward, rows and dQ.
std::int64_t fitting_heads(const PlanData& plan) {
  const Problem& p = plan.problem;
  const std::int64_t dims = key_and_value_bytes(p);
  const std::int64_t each = core::shares_keys(plan.kernel) ? plan.work.splits : 1;
  const std::int64_t head_bytes = p.pass != Pass::backward
                                      ? p.seqlen_k * dims / (p.group() / plan.row_heads)
                                      : p.seqlen_q * (dims + p.head_dim * 4) * p.group() / each;
  return plan.device.l2_bytes * 2 / 3 / core::max<std::int64_t>(1, head_bytes);
}

/// Heads whose tiles make whole pairs of rounds.
std::int64_t heads_of_rounds(const PlanData& plan) {
  const std::int64_t pair = 2 * resident_blocks(plan.kernel, plan.device);
  return pair / std::gcd(pair, std::int64_t{plan.work.blocks});
}

/// Heads whose tiles are about as many as the device has multiprocessors.
std::int64_t filling_heads(const PlanData& plan) {
  return plan.device.threads / core::max(1, plan.work.blocks);
}

/// Of tiles that are handed out as multiprocessors get free, so rounds do not matter: heads of so
/// many columns together. The longest tiles of as many heads as fill all multiprocessors had better
/// begin together. Not of many, though they fit: the sooner a head's tiles follow each other, the
/// more is found.
constexpr int kFewColumns = 2048;
std::int64_t section_of_few(const PlanData& plan, int columns = kFewColumns) {
  return core::min<std::int64_t>(columns / plan.kernel.head_dim,
                                 core::max(fitting_heads(plan), filling_heads(plan)));
}

std::int64_t section_of_backward(const PlanData& plan) {
  const bool in_order = adds_in_order(plan);
  const int few_columns = in_order ? kFewColumns / 2 : kFewColumns;
  if (tiles_are_alike(plan.problem)) {
    // Tiles of one head that all begin with the same rows add to the same dQ at the same time,
    // which takes longer where that is much. In order they wait for each other, unless each follows
    // one that began a step before: heads that take turns end so, and so begin the next.
    if (core::splits_roles(plan.kernel) && plan.kernel.extra == core::Extra::none) {
      return few_columns / plan.kernel.head_dim;
    }
    return in_order && core::begins_early(plan.kernel)
               ? core::max<std::int64_t>(2, filling_heads(plan))
               : 1;
  }
  if (in_order && core::begins_early(plan.kernel) && is_masked(plan.problem)) {
    return kFewColumns / 8 / plan.kernel.head_dim;
  }
  return section_of_few(plan, few_columns);
}

std::int64_t section_of_forward(const PlanData& plan) {
  constexpr int kMasked = 24;
  const Problem& p = plan.problem;
  if (tiles_are_alike(p)) return 1;
  if (hands_out_tiles(plan)) return is_masked(p) ? kMasked : section_of_few(plan);
  const std::int64_t rounds = heads_of_rounds(plan);
  return fitting_heads(plan) < rounds ? heads_of_pass(plan) : rounds;
}

}  // namespace

bool hands_out_tiles(const PlanData& plan) {
  const Problem& p = plan.problem;
  if (!core::takes_tiles(plan.kernel) || plan.work.count() <= plan.device.threads) return false;
  if (p.cache) return !p.cache->paged();
  if (p.packed) return true;
  if (tiles_are_alike(p)) return false;
  return plan.kernel.head_dim > 128 ||
         (plan.kernel.head_dim > 64 && fitting_heads(plan) < heads_of_rounds(plan));
}

std::int64_t section_of(const PlanData& plan) {
  const std::int64_t heads = core::max<std::int64_t>(1, heads_of_pass(plan));
  if (!is_gpu(plan.kernel.arch)) return heads;
  const std::int64_t section =
      plan.problem.pass == Pass::backward ? section_of_backward(plan) : section_of_forward(plan);
  return core::min(heads, core::max<std::int64_t>(1, section));
}

int early_heads(const PlanData& plan) {
  const Problem& p = plan.problem;
  if (!core::begins_early(plan.kernel) || !adds_in_order(plan) || plan.work.splits > 1) return 0;
  if (p.window_left >= 0 || p.window_right < 0 || tiles_are_alike(p)) return 0;
  // Which heads these are depends on the batch, and the order of a sum on that.
  if (p.batch_invariant) return 0;
  constexpr std::int64_t kLeast = 4;
  return static_cast<int>(core::min(heads_of_pass(plan), core::max(kLeast, filling_heads(plan))));
}

PlanData plan_row(const core::Kernel& row, const Problem& problem, const Device& device) {
  PlanData plan;
  plan.problem = problem;
  plan.device = device;
  plan.kernel = row;
  plan.kernel_name = name_of(row);
  plan.score = core::make_score(problem.scale(), problem.softcap);
  plan.longest_keys = longest_keys(problem, problem.seqlen_q);
  plan.key_bytes = bytes_of_keys(problem, plan.longest_keys);
  plan.split_n = split_size(row, problem, plan.longest_keys);
  plan.row_heads = shares_rows(row, problem) ? static_cast<int>(problem.group()) : 1;
  const bool forward = row.pass == Pass::forward;
  const std::int64_t rows = problem.seqlen_q * plan.row_heads;
  plan.work.block_m = rows_of_item(row, problem, plan.split_n, device);
  const std::int64_t blocks = forward ? core::ceil_div<std::int64_t>(rows, plan.work.block_m)
                                      : core::ceil_div<std::int64_t>(problem.seqlen_k, row.block_n);
  plan.work.batch = static_cast<int>(problem.batch);
  plan.work.heads = static_cast<int>(problem.num_heads / plan.row_heads) *
                    core::value_passes(row, static_cast<int>(problem.head_dim_v));
  plan.work.blocks = static_cast<int>(blocks);
  plan.work.splits =
      plan.split_n == 0
          ? 1
          : static_cast<int>(core::ceil_div<std::int64_t>(plan.longest_keys, plan.split_n));
  if (core::shares_keys(row)) plan.work.splits = splits_of_rows(plan);
  plan.work.section = section_of(plan);
  plan.work.early = early_heads(plan);
  if (is_gpu(row.arch) && row.form == core::Form::decode) set_spans(plan);
  Workspace counter(&plan.regions);
  layout(counter, plan);
  plan.workspace_bytes = counter.bytes();
  return plan;
}

}  // namespace tessera
