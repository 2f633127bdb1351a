// The forward loops of the catalog's rows, but a GPU's that decode: decode_simulator.cpp.
#include <vector>

#include "core/softmax.h"
#include "tile/accumulator.h"
#include "tile/simulator.h"

namespace tessera::tile {

namespace {

using core::Cover;
using core::Range;

/// Calls body(tile of keys, masked) for the tiles of `keys` that the queries see, in order.
template <class Body>
void for_each_key_tile(const core::Band& band, Range queries, Range keys, int block_n,
                       Simulated& out, const Body& body) {
  for (int begin = keys.begin; begin < keys.end; begin += block_n) {
    const Range tile{begin, core::min(begin + block_n, keys.end)};
    const Cover cover = band.cover(queries, tile);
    if (cover == Cover::none) continue;
    ++(cover == Cover::full ? out.full_tiles : out.masked_tiles);
    body(tile, cover == Cover::partial);
  }
}

/// The same for a GPU row: blocks counted from key 0, last one first.
template <class Body>
void for_each_key_block(const core::Band& band, Range queries, int block_n, Simulated& out,
                        const Body& body) {
  const core::KeyBlocks blocks = core::key_blocks(band, queries, block_n);
  for (int n = blocks.seen.end - 1; n >= blocks.seen.begin; --n) {
    const bool full = blocks.full.begin <= n && n < blocks.full.end;
    ++(full ? out.full_tiles : out.masked_tiles);
    body(Range{n * block_n, core::min((n + 1) * block_n, band.seqlen_k)}, !full);
  }
}

/// What is fetched of a block of keys that lie in pages: whole boxes, whose first keys are looked
/// up.
void fetch_boxes(const PlanData& plan, const Head& head, Range block, Simulated& out) {
  const int size = head.pages().size;
  if (head.pages().table == nullptr) return;
  const int keys = core::box_keys(size, plan.kernel.block_n, plan.problem.cache->leftpad);
  for (int first = block.begin; first < block.end; first += keys) {
    const core::Pages::Place at = head.place(first);
    bool torn = at.slot + keys > size || (first - block.begin) + keys > plan.kernel.block_n;
    for (int key = first; key < core::min(first + keys, block.end); ++key) {
      const core::Pages::Place place = head.place(key);
      torn |= place.column != at.column || place.slot != at.slot + key - first;
    }
    out.torn_boxes += torn ? 1 : 0;
    out.high_boxes += keys > 1 ? 1 : 0;
  }
}

}  // namespace

Simulated simulate_forward(const PlanData& plan, const Tensors& tensors) {
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  const auto dv = static_cast<std::size_t>(p.head_dim_v);
  const auto rows_total = static_cast<std::size_t>(p.rows_q() * p.num_heads);
  Simulated out;
  out.o.assign(rows_total * dv, 0.0F);
  out.lse.assign(rows_total, 0.0F);
  std::vector<std::vector<Accumulator>> parts(rows_total);
  std::vector<float> sinks(rows_total, -core::kInfinity);

  for (std::int64_t index = 0; index < plan.work.count(); ++index) {
    const core::Work item = plan.work.at(index);
    const Head head(plan, tensors, item.batch, item.head);
    const std::int64_t begin = std::int64_t{item.block} * plan.work.block_m;
    const std::int64_t end = core::min(begin + plan.work.block_m, head.rows().count());
    if (begin >= end) continue;
    const Range item_keys = core::split_keys(
        head.band().keys_of(head.rows().queries_of(begin, end)), item.split, plan.split_n);
    for (std::int64_t sub = begin; sub < end; sub += kernel.tile_m) {
      const std::int64_t sub_end = core::min(sub + kernel.tile_m, end);
      const Range queries = head.rows().queries_of(sub, sub_end);
      const Range keys = core::intersect(item_keys, head.band().keys_of(queries));
      std::vector<Accumulator> state(static_cast<std::size_t>(sub_end - sub),
                                     {{}, std::vector<float>(dv, 0.0F)});
      const auto add = [&](Range tile, bool masked) {
        if (is_gpu(kernel.arch) && !kernel.any_layout && kernel.stages == 0)
          fetch_boxes(plan, head, tile, out);
        for (std::int64_t row = sub; row < sub_end; ++row) {
          add_tile(head, row, tile, masked, state[static_cast<std::size_t>(row - sub)]);
        }
      };
      if (is_gpu(kernel.arch)) {
        for_each_key_block(head.band(), queries, kernel.block_n, out, add);
      } else {
        for_each_key_tile(head.band(), queries, keys, kernel.block_n, out, add);
      }
      for (std::int64_t row = sub; row < sub_end; ++row) {
        parts[head.flat(row)].push_back(state[static_cast<std::size_t>(row - sub)]);
        sinks[head.flat(row)] = head.sink2(row);
      }
    }
  }

  for (std::size_t row = 0; row < rows_total; ++row) {
    core::Softmax<float> merged;
    for (const Accumulator& part : parts[row]) {
      merged = core::combine(merged, core::from_lse(core::lse_of(part.softmax)));
    }
    if (p.sink) merged = core::combine(merged, {sinks[row], 1.0F});
    for (const Accumulator& part : parts[row]) {
      const float weight = core::weight_of(core::from_lse(core::lse_of(part.softmax)), merged) *
                           core::inverse_sum(part.softmax);
      for (std::size_t c = 0; c < dv; ++c) out.o[row * dv + c] += weight * part.o[c];
    }
    out.lse[row] = core::lse_of(merged);
  }
  return out;
}

}  // namespace tessera::tile
