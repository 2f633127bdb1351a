// The planner: refusals, splits, cost model, choice.
#include "plan/select.h"

#include <limits>
#include <numeric>

#include "core/storage.h"
#include "plan/catalog.h"
#include "plan/layout.h"
#include "plan/names.h"
#include "plan/text.h"

namespace tessera {

std::int64_t rows_per_head_k(const Problem& problem) { return problem.seqlen_q * problem.group(); }

namespace {

/// What a GPU row asks for beyond its device.
std::string gpu_refusal(const core::Kernel& row, const Problem& problem) {
  if (row.operand != core::operand_of(problem.dtype)) {
    return std::string("multiplies ") + to_string(row.operand) + "; the problem is " +
           to_string(problem.dtype);
  }
  // A row without extras takes the maximum of raw products, so their factor must be positive.
  const bool more = problem.alibi != PerHead::none || problem.bias.has_value() ||
                    problem.dropout_p > 0.0F ||
                    (row.pass == Pass::forward && !(problem.scale() > 0.0F));
  const bool capped = problem.softcap > 0.0F;
  if (row.extra == core::Extra::none && (more || capped)) {
    return "takes no softcap, ALiBi, bias, dropout, and no softmax_scale <= 0";
  }
  if (row.extra == core::Extra::softcap && (more || !capped)) {
    return "takes a softcap, but no ALiBi, bias, dropout, and no softmax_scale <= 0";
  }
  const struct {
    const char* name;
    std::int64_t value;
    int limit;
  } dims[] = {{"head_dim", problem.head_dim, row.head_dim},
              {"head_dim_v", problem.head_dim_v, row.head_dim_v}};
  for (const auto& dim : dims) {
    if (dim.value > dim.limit || (dim.value % 8 != 0 && !row.any_layout)) {
      return (row.any_layout ? "takes head dims up to " : "takes multiples of 8 up to ") +
             std::to_string(dim.limit) + "; " + dim.name + " = " + std::to_string(dim.value);
    }
  }
  if (problem.unaligned && !row.any_layout) {
    return "its copy engine takes addresses and strides that are multiples of 16 bytes; the "
           "problem is unaligned";
  }
  const std::int64_t tiles = core::ceil_div<std::int64_t>(problem.seqlen_q, row.block_m) *
                             problem.num_heads * problem.batch;
  const std::int64_t key_tiles = row.pass == Pass::forward
                                     ? 0
                                     : core::ceil_div<std::int64_t>(problem.seqlen_k, row.block_n) *
                                           problem.num_heads_k * problem.batch;
  constexpr std::int64_t kMostTiles = 1 << 30;  // the kernel counts a little further, in 32 bits
  if (core::max(tiles, key_tiles) > kMostTiles) {
    return "counts up to 2^30 tiles of " +
           std::to_string(tiles > key_tiles ? row.block_m : row.block_n) + " rows; there are " +
           std::to_string(core::max(tiles, key_tiles));
  }
  return {};
}

}  // namespace

std::string refusal(const core::Kernel& row, const Problem& problem, const Device& device) {
  if (is_gpu(row.arch) != is_gpu(device.arch)) {
    return is_gpu(row.arch) ? "runs on a GPU; the device is a CPU"
                            : "runs on a CPU; the device is a GPU";
  }
  if (!runs(device.arch, row.arch)) {
    return std::string("needs ") + to_string(row.arch) + "; the device has " +
           to_string(device.arch);
  }
  if (row.pass != problem.pass) {
    return row.pass == Pass::forward ? "computes the forward pass" : "computes the backward pass";
  }
  if (is_gpu(row.arch)) return gpu_refusal(row, problem);
  if (row.operand == core::Operand::bf16 && problem.dtype != Dtype::bf16) {
    return std::string("multiplies bf16; the problem is ") + to_string(problem.dtype);
  }
  if (row.form == core::Form::decode) {
    const std::int64_t rows = rows_per_head_k(problem);
    if (rows > row.block_m) {
      return "takes at most " + std::to_string(row.block_m) +
             " query rows per key/value head; seqlen_q * num_heads / num_heads_k = " +
             std::to_string(rows);
    }
    if (problem.packed && problem.batch_invariant) {
      return "is chosen by the longest sequence of a packed batch, which batch_invariant forbids; "
             "use a dense problem";
    }
  }
  return {};
}

namespace {

/// Most keys that one block of rows can see.
std::int64_t longest_keys(const Problem& p, std::int64_t queries) {
  const core::Band band =
      core::make_band(static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), p.window_left,
                      p.window_right, p.alignment);
  return core::min<std::int64_t>(p.seqlen_k, std::int64_t{band.left} + band.right + queries);
}

/// Splits pay only where one block of rows faces many keys. They depend on nothing but the shape of
/// a sequence, never on threads or batch, so they change neither repeatability nor batch invariance
/// (S9).
int split_size(const core::Kernel& row, const Problem& p) {
  if (row.split_n == 0 || row.pass != Pass::forward) return 0;
  if (rows_per_head_k(p) > row.block_m) return 0;
  if (p.packed && p.batch_invariant) return 0;
  return longest_keys(p, p.seqlen_q) > row.split_n ? row.split_n : 0;
}

/// Rows of a forward item. A CPU's items are as long as their queries and outputs stay in the
/// second-level cache, which saves requests for keys and copies of them, but short enough that
/// every worker gets some. Only where the bits do not depend on it (S9): blocks of keys are counted
/// from an item's first key, which a window or a split moves.
int rows_of_item(const core::Kernel& row, const Problem& p, int split_n, const Device& device) {
  if (is_gpu(row.arch) || row.pass != Pass::forward || row.form != core::Form::tile ||
      split_n != 0) {
    return row.block_m;
  }
  constexpr int kMostRows = 256, kLeastRows = 64;
  if (p.window_left >= 0) return core::min(row.block_m, kMostRows);
  const std::int64_t row_bytes = (p.head_dim + p.head_dim_v) * 4;
  int rows = row.block_m;
  if (rows * row_bytes > device.l2_bytes / 2) rows = core::min(rows, kMostRows);
  const auto items = [&] {
    return p.batch * p.num_heads_k * core::ceil_div<std::int64_t>(rows_per_head_k(p), rows);
  };
  const bool unequal = p.window_right >= 0 || p.packed;
  const std::int64_t wanted = std::int64_t{unequal ? 4 : 2} * device.threads;
  while (device.threads > 1 && rows > kLeastRows && items() < wanted) rows /= 2;
  return rows;
}

/// Visible (query, key) pairs of the longest sequence, from at most 64 sampled queries.
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

/// core::TileOrder::section of a GPU's plan: heads whose keys fit two thirds of the second-level
/// cache, and whose tiles make whole pairs of rounds, the second of which evens out the first. All
/// heads if there is no such number: where rounds do not end with sections, the imbalance costs
/// more than the cache gives.
int section_of(const PlanData& plan) {
  const Problem& p = plan.problem;
  if (p.window_left < 0 && p.window_right < 0 && !p.packed) return 1;
  const std::int64_t heads = std::int64_t{core::max(1, plan.grid.batch * plan.grid.heads_k)};
  const std::int64_t pair = 2 * std::int64_t{plan.device.threads};
  const std::int64_t least = pair / std::gcd(pair, std::int64_t{plan.grid.row_blocks});
  // What the tiles of a head read again and again: keys and values, or, backward, rows and dQ.
  const std::int64_t dims = (p.head_dim + p.head_dim_v) * size_of(p.dtype);
  const std::int64_t head_bytes = p.pass == Pass::forward
                                      ? p.seqlen_k * dims / (p.group() / plan.packed_heads)
                                      : p.seqlen_q * (dims + p.head_dim * 4) * p.group();
  const std::int64_t fitting =
      plan.device.l2_bytes * 2 / 3 / core::max<std::int64_t>(1, head_bytes);
  // The backward's tiles are handed out as multiprocessors get free: rounds do not matter, but the
  // longest tiles of as many heads as fill all multiprocessors had better begin together.
  if (p.pass == Pass::backward) {
    const std::int64_t filling = plan.device.threads / core::max(1, plan.grid.row_blocks);
    return static_cast<int>(
        core::min(heads, core::max<std::int64_t>(core::max(fitting, filling), 1)));
  }
  return static_cast<int>(fitting < least ? heads : core::min(heads, least));
}

}  // namespace

namespace {

/// Do the query heads of a group share tiles of rows? On a GPU where that makes fewer tiles: few
/// queries leave most of a tile empty. The copy engine then fetches boxes of group x queries.
bool packs(const core::Kernel& row, const Problem& p) {
  if (!is_gpu(row.arch) || row.pass == Pass::backward) return true;
  const std::int64_t group = p.group();
  const bool power_of_two = group > 0 && (group & (group - 1)) == 0;
  constexpr std::int64_t kMostRows = 1 << 30;  // counted in 32 bits
  if (group < 2 || group > row.tile_m || !power_of_two) return false;
  if (p.seqlen_q * group > kMostRows) return false;
  if (row.extra == core::Extra::all || p.sink || (p.packed && p.batch_invariant)) return false;
  return core::ceil_div<std::int64_t>(p.seqlen_q * group, row.block_m) <
         core::ceil_div<std::int64_t>(p.seqlen_q, row.block_m) * group;
}

}  // namespace

PlanData plan_row(const core::Kernel& row, const Problem& problem, const Device& device) {
  PlanData plan;
  plan.problem = problem;
  plan.device = device;
  plan.kernel = row;
  plan.kernel_name = name_of(row);
  plan.score = core::make_score(problem.scale(), problem.softcap);
  plan.split_n = split_size(row, problem);
  plan.packed_heads = packs(row, problem) ? static_cast<int>(problem.group()) : 1;
  const bool forward = row.pass == Pass::forward;
  const std::int64_t rows = problem.seqlen_q * plan.packed_heads;
  plan.grid.block_m = rows_of_item(row, problem, plan.split_n, device);
  const std::int64_t blocks = forward ? core::ceil_div<std::int64_t>(rows, plan.grid.block_m)
                                      : core::ceil_div<std::int64_t>(problem.seqlen_k, row.block_n);
  plan.grid.batch = static_cast<int>(problem.batch);
  plan.grid.heads_k = static_cast<int>(problem.num_heads / plan.packed_heads);
  plan.grid.row_blocks = static_cast<int>(blocks);
  plan.grid.splits = plan.split_n == 0
                         ? 1
                         : static_cast<int>(core::ceil_div<std::int64_t>(
                               longest_keys(problem, problem.seqlen_q), plan.split_n));
  if (is_gpu(row.arch)) {
    plan.order = {plan.grid.row_blocks, plan.grid.batch * plan.grid.heads_k, section_of(plan)};
  }
  Workspace counter(&plan.regions);
  layout(counter, plan);
  plan.workspace_bytes = counter.bytes();
  return plan;
}

namespace {

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

}  // namespace

std::int64_t cost(const PlanData& plan) {
  if (is_gpu(plan.kernel.arch)) return static_cast<std::int64_t>(gpu_cost(plan));
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  const double lanes = row.lanes;
  const double pairs = static_cast<double>(visible_pairs(p)) * static_cast<double>(p.group());
  const double dims = static_cast<double>(p.head_dim + p.head_dim_v);
  const double rows = static_cast<double>(rows_per_head_k(p));
  const double keys = rows > 0 ? pairs / rows : 0;  // seen by an average row
  const double rate = 2.0 * lanes * (row.operand == core::Operand::bf16 ? 2.0 : 1.0);
  const double products = row.pass == Pass::forward ? 1.0 : 2.5;
  // Bytes a core reads from memory in a cycle, when all cores read at once.
  constexpr double kBytesPerCycle = 8.0;
  const double kv_bytes = dims * static_cast<double>(size_of(p.dtype));

  double cycles = 0.0;
  if (row.form == core::Form::decode) {
    // Four rows are multiplied at a time; each score costs a share of a transposing reduction.
    const double padded = static_cast<double>(core::round_up<std::int64_t>(rows_per_head_k(p), 4));
    const double compute = padded * keys * (dims / rate * 1.3 + 4.0);
    cycles = core::max(compute, keys * kv_bytes / kBytesPerCycle);
  } else {
    const double padded =
        static_cast<double>(core::round_up<std::int64_t>(rows_per_head_k(p), row.tile_m));
    const double visits = padded / row.block_m < 1.0 ? 1.0 : padded / row.block_m;
    const bool widens = row.operand == core::Operand::f32 && p.dtype != Dtype::f32;
    const double softmax = 6.0 / lanes;
    const double compute = padded * keys * (dims / rate * products + softmax) +
                           (widens ? visits * keys * dims * 2.0 / lanes : 0.0);
    cycles = core::max(compute, visits * keys * kv_bytes / kBytesPerCycle);
  }
  const double total = cycles + 1000.0;
  return total < 9e18 ? static_cast<std::int64_t>(total) : std::numeric_limits<std::int64_t>::max();
}

Status validate(const Device& device) {
  if (device.threads >= 1 && device.threads <= kMaxThreads) return {};
  return Status::invalid(refused("device.threads", device.threads,
                                 "must lie in [1, " + std::to_string(kMaxThreads) + "]"));
}

Result<Plan> plan(const Problem& problem, const Device& device) {
  if (Status s = validate(problem); !s) return s;
  if (Status s = validate(device); !s) return s;
  std::shared_ptr<const PlanData> best;
  std::int64_t best_cost = 0;
  for (const core::Kernel& row : kCatalog) {
    if (!refusal(row, problem, device).empty()) continue;
    auto candidate = std::make_shared<const PlanData>(plan_row(row, problem, device));
    const std::int64_t candidate_cost = cost(*candidate);
    // Ties: the catalog lists richer instruction sets of a CPU last, but first what of a GPU's rows
    // takes least. Without queries or keys all of them cost the same.
    const bool wins_tie = !is_gpu(row.arch);
    if (best == nullptr || candidate_cost < best_cost ||
        (candidate_cost == best_cost && wins_tie)) {
      best = std::move(candidate);
      best_cost = candidate_cost;
    }
  }
  if (best == nullptr) {
    return Status::unsupported("no kernel accepts this problem:\n" + explain(problem, device));
  }
  return Plan(std::move(best));
}

}  // namespace tessera
