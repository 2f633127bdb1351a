#include "pieces.h"

#include "core/spans.h"
#include "plan/cost.h"
#include "plan/layout.h"

namespace tessera::explorer {
namespace {

using core::Cover;
using core::Range;

/// Rows in runs of `step`, until visit(run) is false.
template <class Visit>
void for_each_run(RowRange rows, std::int64_t step, const Visit& visit) {
  for (std::int64_t begin = rows.begin; begin < rows.end; begin += step) {
    if (!visit(RowRange{begin, core::min(begin + step, rows.end)})) return;
  }
}

Range queries_of(const Head& head, RowRange rows) {
  return head.rows.queries_of(rows.begin, rows.end);
}

}  // namespace

Result<Plan> plan_of_sequences(Problem problem, const Device& device) {
  if (problem.cache) problem.cache->prefix_levels = 0;
  return plan(problem, device);
}

core::Range hull_of(const core::KeyRuns& keys) {
  return {keys.sinks.empty() ? keys.keys.begin : keys.sinks.begin,
          keys.keys.empty() ? keys.sinks.end : keys.keys.end};
}

Head Pieces::head(int batch) const {
  const Problem& p = plan_.problem;
  const core::Sequence sequence = sequence_of(p, tensors_, batch);
  return {sequence, mask_rules_of(p, tensors_).of(sequences_of(p, tensors_), sequence),
          core::Rows{sequence.seqlen_q, plan_.row_heads}};
}

Piece Pieces::piece(const core::Work& work) const {
  Piece piece;
  piece.work = work;
  piece.head = head(work.batch);
  const Head& of = piece.head;
  if (forward()) {
    const std::int64_t first = std::int64_t{work.block} * plan_.work.block_m;
    piece.rows = {first, core::min(first + plan_.work.block_m, of.rows.count())};
    if (piece.rows.size() == 0) return piece;
    const Range queries = queries_of(of, piece.rows);
    piece.keys = core::split_runs(of.mask.runs_of(queries), work.split, plan_.split_n);
    return piece;
  }
  const int block_n = plan_.kernel.block_n;
  const int first = work.block * block_n;
  if (first >= of.sequence.seqlen_k) return piece;
  const Range keys = {first, core::min(first + block_n, of.sequence.seqlen_k)};
  const Range queries = of.mask.band.queries_of(keys);
  piece.keys = {{0, 0}, keys};
  piece.rows = {std::int64_t{queries.begin} * members(), std::int64_t{queries.end} * members()};
  return piece;
}

core::Range Pieces::range_of(const Piece& piece) const {
  const int seqlen_k = piece.head.sequence.seqlen_k, splits = plan_.work.splits;
  const core::KeyRuns all = piece.head.mask.runs_of(queries_of(piece.head, piece.rows));
  const auto end_of = [&](int split) {
    if (split < 0) return 0;
    if (split == splits - 1) return seqlen_k;
    const core::KeyRuns keys = core::split_runs(all, split, plan_.split_n);
    return hull_of(keys.empty() ? all : keys).end;
  };
  return {end_of(piece.work.split - 1), end_of(piece.work.split)};
}

int Pieces::units(int batch) const {
  const Head of = head(batch);
  const core::KeyTiles all = {of.mask.runs_of({0, of.sequence.seqlen_q}),
                              core::decode_tile_keys(plan_.kernel)};
  return all.units(plan_.unit_n / core::decode_tile_keys(plan_.kernel),
                   rows(of) > plan_.kernel.block_m, of.mask);
}

core::KeyTiles Pieces::key_tiles(const Piece& piece) const {
  return {piece.keys, core::decode_tile_keys(plan_.kernel)};
}

Piece Pieces::part(const Piece& item, Range units) const {
  Piece part = item;
  const int unit_tiles = plan_.unit_n / core::decode_tile_keys(plan_.kernel);
  const core::KeyTiles tiles = key_tiles(item);
  // Tiles are whole but at the end of a run of keys.
  const auto keys_before = [&](int tile) {
    if (tile >= tiles.count()) return item.keys.size();
    const Range rest = tiles.from(tile);
    return tile < tiles.sinks ? rest.begin - item.keys.sinks.begin
                              : item.keys.sinks.size() + rest.begin - item.keys.keys.begin;
  };
  part.keys =
      item.keys.part(keys_before(units.begin * unit_tiles), keys_before(units.end * unit_tiles));
  return part;
}

// ---- tiles ----

void Pieces::visit(const Piece& piece, const Visit& visit) const {
  if (piece.rows.size() == 0) return;
  if (!forward()) {
    on_gpu() ? visit_query_blocks(piece, visit) : visit_rows(piece, visit);
  } else if (!on_gpu()) {
    visit_blocks(piece, visit);
  } else {
    decodes() ? visit_key_tiles(piece, visit) : visit_key_blocks(piece, visit);
  }
}

/// A GPU's decoding: tiles of a warp, in two runs of keys.
void Pieces::visit_key_tiles(const Piece& piece, const Visit& visit) const {
  const Range common = piece.head.mask.common_keys(queries_of(piece.head, piece.rows));
  const core::KeyTiles tiles = key_tiles(piece);
  for (int tile = 0; tile < tiles.count(); ++tile) {
    const Range rest = tiles.from(tile);
    const Range whole = {rest.begin, rest.begin + tiles.size};
    const bool full = core::intersect(whole, core::intersect(rest, common)) == whole;
    const Tile one = {piece.rows, core::intersect(whole, rest),
                      full ? Cover::full : Cover::partial};
    if (!visit(one)) return;
  }
}

/// A GPU's forward: blocks of keys are counted from key 0. The rows of a warpgroup say which it
/// needs; those of a tile walk together, so one may wait where another needs what it does not.
void Pieces::visit_key_blocks(const Piece& piece, const Visit& visit) const {
  const int block_n = plan_.kernel.block_n;
  for_each_run(piece.rows, plan_.kernel.tile_m, [&](RowRange rows) {
    const core::KeyBlocks blocks =
        core::key_blocks(piece.head.mask.band, queries_of(piece.head, rows), block_n);
    for (int n = blocks.seen.begin; n < blocks.seen.end; ++n) {
      const bool full = blocks.full.begin <= n && n < blocks.full.end;
      const Range keys = {n * block_n, core::min((n + 1) * block_n, piece.head.sequence.seqlen_k)};
      if (!visit({rows, keys, full ? Cover::full : Cover::partial})) return false;
    }
    return true;
  });
}

/// A CPU's forward and decoding: blocks of keys are counted from the item's first key; sub-tiles of
/// rows take what they see of each.
void Pieces::visit_blocks(const Piece& piece, const Visit& visit) const {
  const int block_n = plan_.kernel.block_n;
  for_each_run(piece.rows, plan_.kernel.tile_m, [&](RowRange rows) {
    const Range queries = queries_of(piece.head, rows);
    const core::KeyRuns own = piece.head.mask.runs_of(queries).among(piece.keys);
    const Range common = piece.head.mask.common_keys(queries);
    for (Range block = piece.keys.first(block_n); !block.empty();
         block = piece.keys.after(block, block_n)) {
      const bool sinks = block.begin < piece.keys.sinks.end;
      const Range keys = core::intersect(sinks ? own.sinks : own.keys, block);
      if (keys.empty()) continue;
      const bool full = core::intersect(keys, common) == keys;
      if (!visit({rows, keys, full ? Cover::full : Cover::partial})) return false;
    }
    return true;
  });
}

/// A CPU's backward: tiles of rows of all heads of the group.
void Pieces::visit_rows(const Piece& piece, const Visit& visit) const {
  const std::int64_t block_m = plan_.kernel.block_m;
  const RowRange all = {
      piece.rows.begin / block_m * block_m,
      core::min(core::round_up(piece.rows.end, block_m), piece.head.rows.count())};
  for_each_run(all, block_m, [&](RowRange rows) {
    const Cover cover = piece.head.mask.band.cover(queries_of(piece.head, rows), piece.keys.keys);
    return cover == Cover::none || visit({rows, piece.keys.keys, cover});
  });
}

/// A GPU's backward: tiles of rows of the group's first query head. Of pieces that share the keys
/// each has its own of them, and of the other heads'.
void Pieces::visit_query_blocks(const Piece& piece, const Visit& visit) const {
  const int block_m = plan_.kernel.block_m, block_n = plan_.kernel.block_n;
  const int first = piece.work.block * block_n;
  const core::QueryBlocks blocks =
      core::query_blocks(piece.head.mask.band, {first, first + block_n}, block_m);
  const core::RowSteps steps =
      core::row_steps(blocks.seen, piece.head.rows.group, piece.work.split, plan_.work.splits);
  for (int i = 0; i < steps.count; ++i) {
    const auto [member, m] = steps.at(i);
    if (member > 0) break;
    const bool full = blocks.full.begin <= m && m < blocks.full.end;
    const int begin = m * block_m;
    const RowRange rows = {begin, core::min(begin + block_m, piece.head.sequence.seqlen_q)};
    if (!visit({rows, piece.keys.keys, full ? Cover::full : Cover::partial})) return;
  }
}

// ---- costs ----

/// Keys of the piece that an average row of it sees, from at most 64 sampled queries.
double Pieces::keys_of_row(const Piece& piece) const {
  const Range queries = forward() ? queries_of(piece.head, piece.rows)
                                  : piece.head.mask.band.queries_of(piece.keys.keys);
  const std::int64_t samples = core::min(queries.size(), 64);
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    const int query =
        queries.begin + static_cast<int>((2 * i + 1) * queries.size() / (2 * samples));
    sum += piece.head.mask.runs_of({query, query + 1}).among(piece.keys).size();
  }
  return samples > 0 ? static_cast<double>(sum) / static_cast<double>(samples) : 0.0;
}

double Pieces::cycles(const Piece& piece) const {
  if (piece.rows.size() == 0) return 0.0;
  if (!on_gpu()) {
    return piece.heads *
           cpu_piece_cost(plan_, static_cast<double>(piece.rows.size()), keys_of_row(piece));
  }
  const core::Band& band = piece.head.mask.band;
  const core::Kernel& row = plan_.kernel;
  const int steps =
      forward()
          ? core::key_blocks(band, queries_of(piece.head, piece.rows), row.block_n).seen.size()
          : core::row_steps(core::query_blocks(band, piece.keys.keys, row.block_m).seen,
                            piece.head.rows.group, piece.work.split, plan_.work.splits)
                .count;
  return gpu_piece_cost(plan_, facts_of(row.arch).costs, steps);
}

double Pieces::cycles_of_unit() const {
  const core::Kernel& row = plan_.kernel;
  return gpu_piece_cost(plan_, facts_of(row.arch).costs,
                        static_cast<double>(plan_.unit_n) / row.block_n);
}

}  // namespace tessera::explorer
