// The loops of a GPU's decoding rows (cuda/mma/decode.h, decode_walk.h, decode_results.h): spans of
// the line of items, one block of threads each, in the order in which blocks begin; pieces of
// items, whose tiles the block's teams take in turn; parts, which are left in slots of the plan's
// workspace for the block that takes them in.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/mma_shape.h"
#include "core/softmax.h"
#include "plan/layout.h"
#include "tile/accumulator.h"
#include "tile/simulator.h"

namespace tessera::tile {
namespace {

using core::Range;

/// A row's share of some keys: normalised output, natural-log lse.
struct PartOfRow {
  float lse = -core::kInfinity;
  std::vector<float> o;
};
using Part = std::vector<PartOfRow>;

/// A block of rows of a key/value head of a sequence on the line.
struct Item {
  Head head;
  std::int64_t first_row;
  std::size_t rows;
  std::size_t slot;  ///< of its first unit, if every one has a slot
  core::KeyTiles keys;
  core::SpanItem place;
};

class DecodeSimulator {
 public:
  DecodeSimulator(const PlanData& plan, const Tensors& tensors)
      : p_(plan.problem),
        spans_(plan.spans),
        tile_keys_(core::decode_tile_keys(plan.kernel)),
        unit_tiles_(plan.unit_n / tile_keys_),
        rows_(plan.kernel.block_m),
        // With qv a tile is the whole block's.
        teams_(plan.kernel.qv ? 1 : core::decode_teams(plan.kernel)),
        dv_(static_cast<std::size_t>(p_.head_dim_v)) {
    Workspace counter;
    slots_.resize(static_cast<std::size_t>(layout_gpu_decode(counter, plan).slots));
    const auto all_rows = static_cast<std::size_t>(p_.rows_q() * p_.num_heads);
    out_.o.assign(all_rows * dv_, 0.0F);
    out_.lse.assign(all_rows, 0.0F);
    int start = 0;
    for (int batch = 0; batch < plan.work.batch; ++batch) {
      for (int head = 0; head < plan.work.heads; ++head) {
        const Head of(plan, tensors, batch, head);
        const core::KeyTiles all = {of.mask().runs_of({0, of.sequence().seqlen_q}), tile_keys_};
        const std::int64_t rows = of.rows().count();
        for (std::int64_t first = 0; first < std::max<std::int64_t>(rows, 1); first += rows_) {
          const std::int64_t end = std::min(first + rows_, rows);
          const int block = static_cast<int>(first / rows_);
          const int index = (batch * plan.work.heads + head) * plan.work.blocks + block;
          const core::KeyTiles keys = {of.mask().runs_of(of.rows().queries_of(first, end)),
                                       tile_keys_};
          items_.push_back({of,
                            first,
                            static_cast<std::size_t>(end - first),
                            static_cast<std::size_t>(index * units_of_item(plan)),
                            keys,
                            {start, all.units(unit_tiles_, rows > rows_, of.mask())}});
          start += spans_.cost(items_.back().place.units);
        }
      }
    }
    spans_.cut(start);
  }

  Simulated run() {
    // No block waits for one that begins after it: parts are there when they are merged.
    for (int span = spans_.count - 1; span >= 0; --span) {
      for (std::size_t i = 0; i < items_.size(); ++i) attend(i, span);
    }
    for (const std::optional<Part>& slot : slots_) out_.lost_parts += slot ? 1 : 0;
    return out_;
  }

 private:
  /// The units of the item that the span has, in one piece, or, batch_invariant, unit by unit.
  void attend(std::size_t index, int span) {
    const Item& item = items_[index];
    const Range units = spans_.units_of(item.place, span);
    if (units.empty()) return;
    if (p_.batch_invariant) {
      attend_units(item, units);
      return;
    }
    Part part = part_of(item, units);
    const int first = spans_.span_of(item.place, 0), number = span - first;
    const core::PartTree tree = {spans_.span_of(item.place, item.place.units - 1) - first + 1};
    for (int shift = 0; tree.others(number, shift) > 0; shift += core::PartTree::kShift) {
      take_in(part, static_cast<std::size_t>(span) + (1U << shift), 1U << shift,
              tree.others(number, shift));
    }
    if (number > 0) {
      leave(std::move(part), static_cast<std::size_t>(span));
    } else {
      write(item, part);
      out_.merged_items += tree.parts > 1 ? 1 : 0;
    }
  }
  void attend_units(const Item& item, Range units) {
    for (int unit = units.begin; unit < units.end; ++unit) {
      Part part = part_of(item, {unit, unit + 1});
      if (item.place.units == 1) {
        write(item, part);
        return;
      }
      leave(std::move(part), item.slot + static_cast<std::size_t>(unit));
    }
    if (units.begin > 0) return;
    Part merged(item.rows, {-core::kInfinity, std::vector<float>(dv_, 0.0F)});
    take_in(merged, item.slot, 1, item.place.units);
    write(item, merged);
    ++out_.merged_items;
  }

  /// Units of the item, from all teams of a block.
  Part part_of(const Item& item, Range units) {
    const Head& head = item.head;
    const std::size_t rows = item.rows;
    const Range common = head.mask().common_keys(
        head.rows().queries_of(item.first_row, item.first_row + static_cast<std::int64_t>(rows)));
    const int first = units.begin * unit_tiles_;
    const int end = core::min(units.end * unit_tiles_, item.keys.count());
    std::vector<std::vector<Accumulator>> teams(
        static_cast<std::size_t>(teams_),
        std::vector<Accumulator>(rows, {{}, std::vector<float>(dv_, 0.0F)}));
    for (int tile = first; tile < end; ++tile) {
      const Range rest = item.keys.from(tile);
      const int after = rest.begin + tile_keys_;
      const bool masked = after > rest.end || rest.begin < common.begin || after > common.end;
      ++(masked ? out_.masked_tiles : out_.full_tiles);
      std::vector<Accumulator>& team = teams[static_cast<std::size_t>((tile - first) % teams_)];
      for (std::size_t row = 0; row < rows; ++row) {
        add_tile(head, item.first_row + static_cast<std::int64_t>(row),
                 {rest.begin, core::min(after, rest.end)}, masked, team[row]);
      }
    }
    Part part(rows);
    for (std::size_t row = 0; row < rows; ++row) {
      core::Softmax<float> merged;
      for (const auto& team : teams) merged = core::combine(merged, team[row].softmax);
      // A row's sink enters with its first part.
      const core::FinishedRow<float> finished =
          core::finish(merged, p_.sink && units.begin == 0,
                       head.sink2(item.first_row + static_cast<std::int64_t>(row)) * core::kLn2);
      part[row] = {core::lse_of(finished.state), std::vector<float>(dv_, 0.0F)};
      for (const auto& team : teams) {
        const float scale =
            core::exp2(team[row].softmax.max - core::shift_of(merged.max)) * finished.factor;
        for (std::size_t c = 0; c < dv_; ++c) part[row].o[c] += scale * team[row].o[c];
      }
    }
    return part;
  }

  void leave(Part part, std::size_t at) {
    std::optional<Part>& slot = slots_.at(at);
    out_.lost_parts += slot ? 1 : 0;
    slot = std::move(part);
  }

  /// Merges a part with others, which are there, in their order.
  void take_in(Part& mine, std::size_t slot, std::size_t step, int count) {
    std::vector<Part> parts = {mine};
    for (int i = 0; i < count; ++i, slot += step) {
      std::optional<Part>& other = slots_.at(slot);
      if (other) {
        parts.push_back(std::move(*other));
        other.reset();
      } else {
        ++out_.lost_parts;
      }
    }
    for (std::size_t row = 0; row < mine.size(); ++row) {
      core::Softmax<float> all;
      for (const Part& part : parts) all = core::combine(all, core::from_lse(part[row].lse));
      mine[row] = {core::lse_of(all), std::vector<float>(dv_, 0.0F)};
      for (const Part& part : parts) {
        const float weight = core::weight_of(core::from_lse(part[row].lse), all);
        for (std::size_t c = 0; c < dv_; ++c) mine[row].o[c] += weight * part[row].o[c];
      }
    }
  }

  void write(const Item& item, const Part& rows) {
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const std::size_t at = item.head.flat(item.first_row + static_cast<std::int64_t>(row));
      out_.lse[at] = rows[row].lse;
      std::copy(rows[row].o.begin(), rows[row].o.end(),
                out_.o.begin() + static_cast<std::ptrdiff_t>(at * dv_));
    }
  }

  const Problem& p_;
  core::Spans spans_;
  const int tile_keys_, unit_tiles_;
  const std::int64_t rows_;  ///< of a block
  const int teams_;
  const std::size_t dv_;
  std::vector<Item> items_;
  std::vector<std::optional<Part>> slots_;
  Simulated out_;
};

}  // namespace

Simulated simulate_decode(const PlanData& plan, const Tensors& tensors) {
  return DecodeSimulator(plan, tensors).run();
}

}  // namespace tessera::tile
