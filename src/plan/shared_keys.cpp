// How many pieces of a GPU's backward share a block of keys: what a pass would take with so many is
// worked out piece by piece, as multiprocessors get free.
#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "plan/layout_gpu.h"
#include "plan/shape.h"

namespace tessera {
namespace {

// Times are told in steps, each a block of rows beside a block of keys; fitted to 60 problems on an
// H200 (docs/experiments.md).
constexpr double kCrossing = 3.0;        // from one piece to the next
constexpr double kLaunch = 2.0;          // of the kernel that sums up
constexpr double kStepBytes = 90'000.0;  // of sums, written and read, of a multiprocessor
constexpr double kGain = 0.97;           // that it must be worth: sums take memory
constexpr double kMissing = 0.1;  // of a step, for twice as many rows as the second-level cache has
constexpr double kMostMissing = 1.25;

constexpr int kSplits[] = {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
constexpr double kPieces = 8.0;  // of a multiprocessor: of more, each is short beside its crossing

/// Of a packed batch the average stands for each sequence: the longest may be the only one of its
/// kind.
Problem with_average(Problem p) {
  if (p.packed && p.batch > 0) {
    p.seqlen_q = core::max<std::int64_t>(1, p.total_q / p.batch);
    p.seqlen_k = core::max<std::int64_t>(1, p.total_k / p.batch);
  }
  return p;
}

class BackwardTime {
 public:
  BackwardTime(const PlanData& plan, const Problem& p) : plan_(plan), p_(p) {
    const core::Kernel& row = plan.kernel;
    const core::Band band =
        core::make_band(static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), p.window_left,
                        p.window_right, p.alignment);
    seen_.resize(static_cast<std::size_t>(core::ceil_div<std::int64_t>(p.seqlen_k, row.block_n)));
    for (std::size_t i = 0; i < seen_.size(); ++i) {
      const int first = static_cast<int>(i) * row.block_n;
      seen_[i] = core::query_blocks(band, {first, first + row.block_n}, row.block_m).seen;
      most_ = core::max(most_, seen_[i].size());
      equal_ = equal_ && seen_[i].size() == seen_[0].size();
    }
  }

  std::int64_t tiles() const {
    return p_.batch * p_.num_heads_k * static_cast<std::int64_t>(seen_.size());
  }
  int most_steps() const { return static_cast<int>(most_ * p_.group()); }

  double time(int splits) const {
    PlanData plan = plan_;
    plan.problem = p_;
    plan.work.blocks = static_cast<int>(seen_.size());
    plan.work.splits = splits;
    plan.work.section = section_of(plan);
    plan.work.early = early_heads(plan);
    const double step = time_of_step(splits);
    const bool in_order = in_order_with(splits);
    std::priority_queue<double, std::vector<double>, std::greater<>> free;
    for (std::int64_t i = 0; i < workers(); ++i) free.push(0.0);
    double last = 0.0;
    for (std::int64_t i = 0; i < plan.work.count(); ++i) {
      const core::Work work = plan.work.backward_at(i);
      const auto block = static_cast<std::size_t>(plan.work.key_block(work, in_order));
      const core::RowSteps steps =
          core::row_steps(seen_[block], static_cast<int>(p_.group()), work.split, splits);
      const double done = free.top() + steps.count * step + kCrossing;
      free.pop();
      free.push(done);
      last = core::max(last, done);
    }
    const core::Kernel& row = plan.kernel;
    const double tile_bytes = 4.0 * row.block_n * (row.head_dim + row.head_dim_v);
    const double sums = kLaunch + static_cast<double>(plan.work.count()) * tile_bytes /
                                      (kStepBytes * static_cast<double>(workers()));
    return last + (splits > 1 ? sums : 0.0);
  }

  /// Of the problem as it is, not of its average.
  bool in_order_with(int splits) const {
    PlanData plan = plan_;
    plan.work.splits = splits;
    return adds_in_order(plan);
  }

  std::int64_t workers() const { return resident_blocks(plan_.kernel, plan_.device); }

 private:
  /// Where blocks of keys see unequally many rows, those with few are heads ahead of the others:
  /// what all of them read and add to is as many heads' rows, which have to stay in the cache.
  double time_of_step(int splits) const {
    if (equal_) return 1.0;
    const double row_bytes = static_cast<double>(key_and_value_bytes(p_) + 4 * p_.head_dim);
    const double heads =
        core::max(1.0, static_cast<double>(workers()) / static_cast<double>(seen_.size())) *
        static_cast<double>(p_.group()) / splits;
    const double bytes = heads * static_cast<double>(p_.seqlen_q) * row_bytes;
    const double cached = static_cast<double>(plan_.device.l2_bytes) * 2 / 3;
    return core::min(kMostMissing, 1.0 + kMissing * std::log2(core::max(1.0, bytes / cached)));
  }

  const PlanData& plan_;
  const Problem& p_;
  std::vector<core::Range> seen_;  ///< blocks of rows, by block of keys
  int most_ = 0;
  bool equal_ = true;
};

}  // namespace

int splits_of_rows(const PlanData& plan) {
  // A sequence's bits may not depend on the batch (S9).
  if (plan.problem.batch_invariant || plan.work.count() == 0) return 1;
  const Problem p = with_average(plan.problem);
  const auto tiles = static_cast<double>(
      p.batch * p.num_heads_k * core::ceil_div<std::int64_t>(p.seqlen_k, plan.kernel.block_n));
  const auto workers = static_cast<double>(resident_blocks(plan.kernel, plan.device));
  if (tiles > 4 * workers) return 1;
  const BackwardTime pass(plan, p);
  // Sums have room for as many tiles a sequence as the longest may have, most of them surplus where
  // that is only a bound.
  const auto places = static_cast<double>(plan.work.count());
  int best = 1;
  double least = pass.time(1) * kGain;
  for (const int splits : kSplits) {
    if (splits > pass.most_steps() || places * splits > kPieces * workers) break;
    const double time = pass.time(splits);
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

}  // namespace tessera
