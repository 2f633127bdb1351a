// The backward loops of the catalog's rows.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/softmax.h"
#include "plan/layout.h"
#include "tile/head.h"
#include "tile/pieces.h"
#include "tile/simulator.h"

namespace tessera::tile {

namespace {

using core::Cover;
using core::Range;

/// Everything one key adds to the gradients of one row.
void add_pair(const Head& head, const Problem& p, std::int64_t row, int key, float delta,
              Simulated& out) {
  float slope = 1.0F;
  const float s = head.score2(row, key, &slope);
  const float probability = core::exp2(s - core::backward_shift(head.lse(row)));
  const float keep = head.keep(row, key);
  const auto d = static_cast<std::size_t>(p.head_dim);
  const auto dv = static_cast<std::size_t>(p.head_dim_v);
  float dp = 0.0F;
  for (std::size_t c = 0; c < dv; ++c) {
    out.dv[head.flat_k(key) * dv + c] += probability * keep * head.dout(row)[c];
    dp += head.dout(row)[c] * head.v(key)[c];
  }
  const float dscore = probability * (dp * keep - delta);
  const float ds = core::score_gradient(head.score(), dscore, slope).product * p.scale();
  for (std::size_t c = 0; c < d; ++c) {
    out.dk[head.flat_k(key) * d + c] += ds * head.q(row)[c];
    out.dq[head.flat(row) * d + c] += ds * head.k(key)[c];
  }
}

/// rowsum(dout * o) - dlse: what every score gradient of the row is reduced by.
float delta_of(const Head& head, const Problem& p, std::int64_t row) {
  float delta = -head.dlse(row);
  for (std::int64_t c = 0; c < p.head_dim_v; ++c) delta += head.dout(row)[c] * head.o(row)[c];
  return delta;
}

/// The GPU's backward: rows are prepared, blocks of keys walk over them, dQ is finished, by a
/// kernel of its own where consumers have roles and otherwise as rows get complete. Its memory and
/// all results are NaN before; what is written twice becomes infinite, and what is added when it is
/// another one's turn. Rows that nobody finds complete stay NaN.
class GpuBackward {
 public:
  GpuBackward(const PlanData& plan, const Tensors& tensors)
      : plan_(plan),
        p_(plan.problem),
        t_(tensors),
        row_(plan.kernel),
        memory_(plan.workspace_bytes / sizeof(float) + kCacheLine, kNan) {
    void* start = memory_.data();
    std::size_t room = memory_.size() * sizeof(float);
    Workspace workspace(std::align(Plan::workspace_alignment, plan.workspace_bytes, start, room));
    layout_ = layout_gpu_backward(workspace, plan);
    rows_ = {layout_.statistics, layout_.dq, layout_.blocks, static_cast<int>(p_.num_heads),
             row_.block_m * row_.head_dim};
  }

  Simulated run() {
    out_.dq.assign(static_cast<std::size_t>(p_.rows_q() * p_.num_heads * p_.head_dim), kNan);
    out_.dk.assign(static_cast<std::size_t>(p_.rows_k() * p_.num_heads_k * p_.head_dim), kNan);
    out_.dv.assign(static_cast<std::size_t>(p_.rows_k() * p_.num_heads_k * p_.head_dim_v), kNan);
    if (p_.sink) out_.dsink.assign(static_cast<std::size_t>(p_.num_heads), 0.0F);
    begin_bias();
    for_each_row_block([this](const Head& head, int m, int member) { prepare(head, m, member); });
    // One tile after another as they are handed out: nothing may wait for a later one.
    finishers_.resize(
        static_cast<std::size_t>(std::min<std::int64_t>(plan_.work.count(), plan_.device.threads)));
    const std::int64_t count = plan_.work.count();
    for (std::int64_t i = 0; i < count; ++i) {
      walk_tile(plan_.work.backward_at(i));
      if (!roles_) finish_complete(i + 1 < count);
    }
    if (roles_ || count == 0) {
      for_each_row_block([this](const Head& head, int m, int member) { finish(head, m, member); });
    }
    sum_splits();
    finish_bias();
    if (p_.sink) sum_sinks();
    return std::move(out_);
  }

 private:
  static constexpr float kNan = __builtin_nanf("");
  static constexpr std::size_t kCacheLine = Plan::workspace_alignment / sizeof(float);

  static void write_once(float& to, float x) { to = std::isnan(to) ? x : core::kInfinity; }

  /// As many blocks a sequence as the longest has.
  template <class Body>
  void for_each_row_block(const Body& body) {
    for (int b = 0; b < static_cast<int>(p_.batch); ++b) {
      for (int head_k = 0; head_k < static_cast<int>(p_.num_heads_k); ++head_k) {
        const Head head(plan_, t_, b, head_k);
        for (int m = 0; m < layout_.blocks.per_sequence; ++m) {
          for (int member = 0; member < head.rows().group; ++member) body(head, m, member);
        }
      }
    }
  }

  std::int64_t block_of(const Head& head, int m) const {
    return layout_.blocks.first_of(head.sequence()) + m;
  }
  /// Of the core::Rows of the head.
  static std::int64_t row_of(const Head& head, int query, int member) {
    return std::int64_t{query} * head.rows().group + member;
  }
  float& ds_of(int r, int j) {
    return ds_[static_cast<std::size_t>(std::int64_t{r} * row_.block_n + j)];
  }
  /// Of the two consumers.
  std::int32_t* turns_of(const Head& head, int m, int member) const {
    return layout_.turns + 2 * rows_.index_of(block_of(head, m), head.head_of(member));
  }
  float& sink_part(const Head& head, int m, int member) {
    return layout_
        .sink_parts[(head.head_of(member) * p_.batch + head.batch()) * layout_.blocks.per_sequence +
                    m];
  }

  int pieces() const { return rows_.sums / cuda::sm90::kPieceFloats; }

  void prepare(const Head& head, int m, int member) {
    const int first = m * row_.block_m, seqlen_q = head.sequence().seqlen_q;
    if (p_.sink) sink_part(head, m, member) = 0.0F;
    if (first >= seqlen_q) return;
    std::fill(turns_of(head, m, member), turns_of(head, m, member) + 2, 0);
    if (!ordered_ || keys_of(head, m).empty()) {
      float* const dq = rows_.dq_of(block_of(head, m), head.head_of(member));
      std::fill(dq, dq + rows_.sums, 0.0F);
    }
    float* const statistics = rows_.statistics_of(block_of(head, m), head.head_of(member));
    for (int r = 0; r < row_.block_m; ++r) {
      const bool exists = first + r < seqlen_q;
      const std::int64_t row = row_of(head, first + r, member);
      statistics[r] = exists ? core::backward_shift(head.lse(row)) : core::kInfinity;
      statistics[row_.block_m + r] = exists ? delta_of(head, p_, row) : 0.0F;
      if (p_.sink && exists) {
        sink_part(head, m, member) -=
            core::exp2(head.sink2(row) - statistics[r]) * statistics[row_.block_m + r];
      }
    }
  }

  void walk_tile(const core::Work& work) {
    const Head head(plan_, t_, work.batch, work.head);
    const int block = plan_.work.key_block(work, ordered_);
    const int first_key = block * row_.block_n;
    if (first_key >= head.sequence().seqlen_k) return;
    const core::QueryBlocks blocks =
        core::query_blocks(head.band(), {first_key, first_key + row_.block_n}, row_.block_m);
    dk_.assign(static_cast<std::size_t>(row_.block_n * p_.head_dim), 0.0F);
    dv_.assign(static_cast<std::size_t>(row_.block_n * p_.head_dim_v), 0.0F);
    const core::RowSteps steps =
        core::row_steps(blocks.seen, head.rows().group, work.split, plan_.work.splits);
    const core::RowWalk walk = core::row_walk(blocks.seen, work.early);
    for (int i = 0; i < steps.count; ++i) {
      const auto [member, place] = steps.at(i);
      const int m = walk.block_at(place);
      const bool full = blocks.full.begin <= m && m < blocks.full.end;
      ++(full ? out_.full_tiles : out_.masked_tiles);
      weigh(head, first_key, m, member, !full);
      add_queries(head, walk, first_key, m, member);
    }
    if (plan_.work.splits == 1) return write(head, first_key);
    parts_[{work.batch, work.head, first_key}][work.split] = {dk_, dv_};
  }

  /// dK and dV of keys that several pieces share, in the order of the splits, all of which are
  /// there.
  void sum_splits() {
    for (auto& [keys, parts] : parts_) {
      const auto [batch, head, first_key] = keys;
      if (static_cast<int>(parts.size()) != plan_.work.splits) continue;  // stays NaN
      std::fill(dk_.begin(), dk_.end(), 0.0F);
      std::fill(dv_.begin(), dv_.end(), 0.0F);
      for (const auto& [split, sums] : parts) {
        for (std::size_t i = 0; i < dk_.size(); ++i) dk_[i] += sums.first[i];
        for (std::size_t i = 0; i < dv_.size(); ++i) dv_[i] += sums.second[i];
      }
      write(Head(plan_, t_, batch, head), first_key);
    }
  }

  /// A block of rows: dS, and what it adds to dK and dV.
  void weigh(const Head& head, int first_key, int m, int member, bool masked) {
    const float* const statistics = rows_.statistics_of(block_of(head, m), head.head_of(member));
    const auto d = static_cast<std::size_t>(p_.head_dim);
    const auto dv = static_cast<std::size_t>(p_.head_dim_v);
    const core::Band& band = head.band();
    ds_.assign(static_cast<std::size_t>(std::int64_t{row_.block_m} * row_.block_n), 0.0F);
    for (int j = 0; j < row_.block_n; ++j) {
      const int key = first_key + j;
      const Range rows = key < band.seqlen_k ? band.queries_of({key, key + 1}) : Range{0, 0};
      for (int r = 0; r < row_.block_m; ++r) {
        const int query = m * row_.block_m + r;
        if (masked && (query < rows.begin || query >= rows.end)) {
          if (query < band.seqlen_q && key < band.seqlen_k) {
            add_bias(head, row_of(head, query, member), key, 0.0F);
          }
          continue;
        }
        float& ds = ds_of(r, j);
        if (query >= band.seqlen_q || key >= band.seqlen_k) {
          ds = kNan;  // only a mask may keep it out
          continue;
        }
        const std::int64_t row = row_of(head, query, member);
        float slope = 1.0F, dp = 0.0F;
        const float s = head.score2(row, key, &slope);
        const float weight = core::exp2(s - statistics[r]), keep = head.keep(row, key);
        for (std::size_t c = 0; c < dv; ++c) {
          dv_[static_cast<std::size_t>(j) * dv + c] += weight * keep * head.dout(row)[c];
          dp += head.dout(row)[c] * head.v(key)[c];
        }
        ds = weight * (dp * keep - statistics[row_.block_m + r]);
        const core::ScoreGradient<float> gradient = core::score_gradient(plan_.score, ds, slope);
        add_bias(head, row, key, gradient.bias);
        ds = gradient.product;
        for (std::size_t c = 0; c < d; ++c) {
          dk_[static_cast<std::size_t>(j) * d + c] += ds * head.q(row)[c];
        }
      }
    }
  }

  /// dQ += dS K, each consumer its pieces; in an order, the first = dS K.
  void add_queries(const Head& head, const core::RowWalk& walk, int first_key, int m, int member) {
    float* const dq = rows_.dq_of(block_of(head, m), head.head_of(member));
    const int keys = head.band().seqlen_k - first_key;
    const bool stores = ordered_ && turns_of(head, m, member)[0] == 0;
    const float fault = my_turn(head, walk, first_key, m, member) ? 0.0F : core::kInfinity;
    for (int piece = 0; piece < pieces(); ++piece) {
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < 32; ++i) {
          const PieceElement x = added(row_, piece, thread, i);
          if (x.column >= p_.head_dim) continue;
          float sum = fault;
          for (int j = 0; j < row_.block_n; ++j) {
            sum += ds_of(x.row, j) * (j < keys ? head.k(first_key + j)[x.column] : 0.0F);
          }
          dq[x.at] = stores ? sum : dq[x.at] + sum;
        }
      }
    }
  }

  /// Key blocks that meet a block of rows.
  Range keys_of(const Head& head, int m) const {
    const Range rows = {m * row_.block_m,
                        core::min((m + 1) * row_.block_m, head.sequence().seqlen_q)};
    return core::key_blocks(head.band(), rows, row_.block_n).seen;
  }

  /// Whether all key blocks that add before have done so; takes the turn of both consumers, which
  /// nobody counts where they have roles and sums no order.
  bool my_turn(const Head& head, const core::RowWalk& walk, int first_key, int m,
               int member) const {
    if (roles_ && !ordered_) return true;
    const int rank = walk.rank_of(keys_of(head, m), first_key / row_.block_n);
    std::int32_t* const turns = turns_of(head, m, member);
    const bool mine = turns[0] == rank && turns[1] == rank;
    ++turns[0];
    ++turns[1];
    return mine || !ordered_;
  }

  void begin_bias() {
    if (!p_.bias) return;
    const auto count = static_cast<std::size_t>(bias_elements(p_));
    out_.dbias.assign(count, shares_bias(p_) ? kNan : 0.0F);
    stored_.assign(count, false);
    if (shares_bias(p_)) std::fill(layout_.dbias, layout_.dbias + count, 0.0F);
  }
  /// The gradient of a score: added to a sum, or, where it has an element of its own, stored once.
  void add_bias(const Head& head, std::int64_t row, int key, float ds) {
    if (!p_.bias) return;
    const BiasShape& shape = *p_.bias;
    std::int64_t at = shape.batch ? head.batch() : 0;
    if (shape.heads) at = at * p_.num_heads + head.head_of(row);
    if (shape.queries) at = at * p_.seqlen_q + head.rows().query_of(row);
    if (shape.keys) at = at * p_.seqlen_k + key;
    const auto i = static_cast<std::size_t>(at);
    if (shares_bias(p_)) {
      layout_.dbias[at] += ds;
    } else {
      out_.dbias[i] = stored_[i] ? core::kInfinity : ds;
      stored_[i] = true;
    }
  }
  void finish_bias() {
    if (!shares_bias(p_)) return;
    for (std::size_t i = 0; i < out_.dbias.size(); ++i) write_once(out_.dbias[i], layout_.dbias[i]);
  }

  void write(const Head& head, int first_key) {
    const auto d = static_cast<std::size_t>(p_.head_dim);
    const auto dv = static_cast<std::size_t>(p_.head_dim_v);
    for (int j = 0; j < row_.block_n && first_key + j < head.band().seqlen_k; ++j) {
      const std::size_t row = head.flat_k(first_key + j), from = static_cast<std::size_t>(j);
      for (std::size_t c = 0; c < d; ++c) {
        write_once(out_.dk[row * d + c], dk_[from * d + c] * plan_.score.scale);
      }
      for (std::size_t c = 0; c < dv; ++c) write_once(out_.dv[row * dv + c], dv_[from * dv + c]);
    }
  }

  /// Every block of threads finishes its share of row blocks in turn, as far as they are complete.
  /// beside: as the warp does that does so while there are tiles; otherwise as the consumers do.
  void finish_complete(bool beside) {
    const auto group = static_cast<int>(p_.group());
    core::WorkOrder order = plan_.work;
    order.heads *= group;
    order.section = std::max<std::int64_t>(1, order.section * group / order.splits);
    order.splits = 1;
    order.blocks = layout_.blocks.per_sequence;
    const auto blocks = static_cast<int>(finishers_.size());
    for (int block = 0; block < blocks; ++block) {
      for (int& taken = finishers_[static_cast<std::size_t>(block)];; ++taken) {
        const int index = block + taken * blocks;
        if (index >= order.count()) break;
        const core::Work work = order.at(index);
        const int m = order.blocks - 1 - work.block;
        const Head head(plan_, t_, work.batch, work.head / group);
        if (m * row_.block_m >= head.sequence().seqlen_q) continue;
        const int member = work.head % group, adders = keys_of(head, m).size();
        const std::int32_t* const turns = turns_of(head, m, member);
        if (turns[0] != adders || turns[1] != adders) break;
        if (beside) {
          finish_beside(head, m, member);
        } else {
          finish(head, m, member);
        }
      }
    }
  }

  void finish(const Head& head, int m, int member) {
    if (m * row_.block_m >= head.sequence().seqlen_q) return;
    for (int piece = 0; piece < pieces(); ++piece) {
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < 32; ++i) {
          write_query(head, m, member, finished(row_, pieces(), piece, thread, i));
        }
      }
    }
  }
  void finish_beside(const Head& head, int m, int member) {
    for (int quarter = 0; quarter < 2 * cuda::sm90::kQuarters; ++quarter) {
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < 8; ++i) {
          write_query(head, m, member, finished_beside(row_, quarter, thread, i));
        }
      }
    }
  }
  /// An element of dQ from its sum.
  void write_query(const Head& head, int m, int member, const PieceElement& x) {
    const int query = m * row_.block_m + x.row;
    if (query >= head.sequence().seqlen_q || x.column >= p_.head_dim) return;
    const float* const dq = rows_.dq_of(block_of(head, m), head.head_of(member));
    const std::size_t row = head.flat(row_of(head, query, member));
    const auto d = static_cast<std::size_t>(p_.head_dim);
    write_once(out_.dq[row * d + static_cast<std::size_t>(x.column)], dq[x.at] * plan_.score.scale);
  }

  void sum_sinks() {
    const std::int64_t count = p_.batch * layout_.blocks.per_sequence;
    for (std::size_t head = 0; head < out_.dsink.size(); ++head) {
      for (std::int64_t i = 0; i < count; ++i) {
        out_.dsink[head] += layout_.sink_parts[static_cast<std::int64_t>(head) * count + i];
      }
    }
  }

  const PlanData& plan_;
  const Problem& p_;
  const Tensors& t_;
  const core::Kernel& row_;
  const bool ordered_ = adds_in_order(plan_);
  const bool roles_ = core::splits_roles(row_);
  std::vector<float> memory_;
  GpuBackwardLayout layout_;
  cuda::RowMemory rows_;
  std::vector<float> dk_, dv_, ds_;  ///< of a tile; of a step
  std::vector<bool> stored_;         ///< elements of dbias that have no sums
  std::vector<int> finishers_;       ///< row blocks of its share that each block has finished
  /// Of (batch, head, first key), by split: dK and dV.
  std::map<std::tuple<int, int, int>,
           std::map<int, std::pair<std::vector<float>, std::vector<float>>>>
      parts_;
  Simulated out_;
};

}  // namespace

Simulated simulate_backward(const PlanData& plan, const Tensors& tensors) {
  if (is_gpu(plan.kernel.arch)) return GpuBackward(plan, tensors).run();
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  Simulated out;
  out.dq.assign(static_cast<std::size_t>(p.rows_q() * p.num_heads * p.head_dim), 0.0F);
  out.dk.assign(static_cast<std::size_t>(p.rows_k() * p.num_heads_k * p.head_dim), 0.0F);
  out.dv.assign(static_cast<std::size_t>(p.rows_k() * p.num_heads_k * p.head_dim_v), 0.0F);
  for (std::int64_t index = 0; index < plan.work.count(); ++index) {
    const core::Work item = plan.work.at(index);
    const Head head(plan, tensors, item.batch, item.head);
    const Range block{item.block * kernel.block_n,
                      core::min((item.block + 1) * kernel.block_n, head.sequence().seqlen_k)};
    const Range seen_by = head.band().queries_of(block);
    if (block.empty() || seen_by.empty()) continue;
    const std::int64_t group = head.rows().group;
    const std::int64_t first = seen_by.begin * group / kernel.block_m * kernel.block_m;
    for (std::int64_t begin = first; begin < seen_by.end * group; begin += kernel.block_m) {
      const std::int64_t end = core::min(begin + kernel.block_m, head.rows().count());
      const Range queries = head.rows().queries_of(begin, end);
      const Cover cover = head.band().cover(queries, block);
      if (cover == Cover::none) continue;
      ++(cover == Cover::full ? out.full_tiles : out.masked_tiles);
      for (std::int64_t row = begin; row < end; ++row) {
        const float delta = delta_of(head, p, row);
        const Range keys =
            cover == Cover::full
                ? block
                : core::intersect(head.band().keys_of(head.rows().query_of(row)), block);
        for (int key = keys.begin; key < keys.end; ++key) {
          add_pair(head, p, row, key, delta, out);
        }
      }
    }
  }
  return out;
}

}  // namespace tessera::tile
