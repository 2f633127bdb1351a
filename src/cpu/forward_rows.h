// The rows of a forward item: where they lie, the keys that each sees, and their ways in and out:
// queries into lanes, outputs and their lse to memory, or to where combine finds them. Up to
// block_m rows lie in sub-tiles of kTile, one row a SIMD lane.
#pragma once

#include "core/softmax.h"
#include "cpu/copy.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

/// kTile rows: one SIMD lane each. The rows past `lanes` repeat the last one.
struct SubTile {
  int first = 0;  ///< of the item's rows
  int lanes = 0;
  core::Range queries;
  core::Range sinks, keys;  ///< of the item's runs, what holds all that one of the rows sees
  int first_lanes_end;      ///< where the keys end that rows outside the last vector see
  bool started = false;     ///< its output holds something
};

/// The keys that the rows of a sub-tile see, and what they have gathered of them so far.
struct SubTileState {
  I32 first[kNV], last[kNV];
  F32 reference[kNV], sum[kNV];
  int sink_tokens;            ///< seen before `first`, too
  int first_of_tree;          ///< the key from which on bits decide
  const std::uint32_t* tree;  ///< [2][block_m] low and high halves, from the sub-tile's first row
  std::int64_t tree_stride;

  /// x where row n * kLanes + lane sees the key.
  TESSERA_INLINE F32 visible(int n, int key, F32 x, F32 otherwise) const {
    Mask seen = I32(key) < last[n];
    if (key >= sink_tokens) seen = seen & (first[n] <= I32(key));
    if (key >= first_of_tree) seen = seen & in_tree(n, key - first_of_tree);
    return select(seen, x, otherwise);
  }

 private:
  [[gnu::noinline]] Mask in_tree(int n, int number) const {
    const U32 bit(std::uint32_t{1} << number % 32);
    return (load(tree + number / 32 * tree_stride + n * kLanes) & bit) == bit;
  }
};

template <core::Kernel K>
class ForwardRows {
  static_assert(K.tile_m == kTile && K.lanes == kLanes && K.block_m % K.tile_m == 0);

 public:
  static constexpr bool kPairs = K.operand == core::Operand::bf16;
  using Word = std::conditional_t<kPairs, std::uint32_t, float>;  ///< lanes of Q and P

  ForwardRows(const Call& call, const core::Work& work, int worker)
      : plan(call.plan),
        problem(call.plan.problem),
        tensors(call.tensors),
        splits(call.layout.splits),
        item(work),
        map(call, item.batch, item.head),
        scratch(scratch_of(call, worker)) {}

  const PlanData& plan;
  const Problem& problem;
  const Tensors& tensors;
  const SplitLayout& splits;
  const core::Work item;
  const RowMap map;
  const ForwardScratch scratch;

  // place() sets these.
  core::KeyRuns keys;  ///< of the item
  int num_tiles = 0;
  SubTile tiles[K.block_m / K.tile_m];

  // ---- geometry ----

  /// Finds the item's rows, and its keys. False: it has no rows, or none of the keys.
  bool place() {
    const int block_m = plan.work.block_m;
    const std::int64_t first = std::int64_t{item.block} * block_m;
    const int count = static_cast<int>(core::min<std::int64_t>(block_m, map.rows.count() - first));
    if (count <= 0) return false;
    keys = core::split_runs(map.mask.runs_of(map.rows.queries_of(first, first + count)), item.split,
                            plan.split_n);
    if (item.split > 0 && keys.empty()) return false;
    place_rows(first, count);
    return true;
  }

  /// The tile's rows, as a range of the item's.
  static core::Range rows_of(const SubTile& tile) { return {tile.first, tile.first + tile.lanes}; }

  /// Keys that every row of the sub-tile sees.
  TESSERA_INLINE core::Range common_keys(const SubTile& tile) const {
    return map.mask.common_keys(tile.queries);
  }

  // ---- scratch ----

  float* output(int t) const { return scratch.o + t * problem.head_dim_v * K.tile_m; }
  Word* queries(int t) const {
    return reinterpret_cast<Word*>(scratch.q) + t * query_steps() * K.tile_m;
  }
  Word* weights() const { return reinterpret_cast<Word*>(scratch.scores); }

  SubTileState load_state(int t) const {
    SubTileState s;
    for (int n = 0; n < kNV; ++n) {
      const int r = tiles[t].first + n * kLanes;
      s.first[n] = load(scratch.first_key + r);
      s.last[n] = load(scratch.last_key + r);
      s.reference[n] = load(scratch.max + r);
      s.sum[n] = load(scratch.sum + r);
    }
    s.sink_tokens = map.mask.sink_tokens;
    s.first_of_tree = map.mask.tree != nullptr ? map.mask.first_of_tree() : INT32_MAX;
    s.tree = scratch.tree + tiles[t].first;
    s.tree_stride = plan.work.block_m;
    return s;
  }

  void store_state(int t, const SubTileState& s) const {
    for (int n = 0; n < kNV; ++n) {
      const int r = tiles[t].first + n * kLanes;
      store(scratch.max + r, s.reference[n]);
      store(scratch.sum + r, s.sum[n]);
    }
  }

  // ---- rows in ----

  void ask_for_query(int r) const {
    prefetch_row<Access::read>(row_address(tensors.q, r, problem.dtype),
                               problem.head_dim * size_of(problem.dtype));
    if (!problem.qv) return;
    prefetch_row<Access::read>(row_address(tensors.qv, r, problem.dtype),
                               problem.head_dim_v * size_of(problem.dtype));
  }
  void ask_for_output(int r) const {
    prefetch_row<Access::write>(row_address(tensors.o, r, problem.stored_o()),
                                problem.head_dim_v * size_of(problem.stored_o()));
  }

  void load_queries(int t) const {
    load_columns(t, tensors.q, problem.head_dim, queries(t));
    if (problem.qv) {
      const std::int64_t step = second_column(K, problem) / (kPairs ? 2 : 1);
      load_columns(t, tensors.qv, problem.head_dim_v, queries(t) + step * kTile);
    }
    if constexpr (!kPairs) {
      if (problem.scales.score_shift) load_shifts(t, queries(t) + problem.head_dim * kTile);
    }
  }

  // ---- results out ----

  void write(int t) const {
    const SubTile& tile = tiles[t];
    if (!tile.started) {
      for (std::int64_t i = 0; i < problem.head_dim_v * K.tile_m; ++i) output(t)[i] = 0.0F;
    }
    float factor[kTile], lse[kTile], sink[kTile];
    const bool whole = plan.work.splits <= 1;
    const bool with_sink = whole && problem.sink;
    for (int i = 0; i < kTile; ++i) {
      sink[i] = with_sink ? tensors.sink[scratch.head[tile.first + i]] : 0.0F;
    }
    for (int n = 0; n < kTile; n += kLanes) {
      const core::Softmax<F32> row = {load(scratch.max + tile.first + n),
                                      load(scratch.sum + tile.first + n)};
      const core::FinishedRow<F32> end = core::finish(row, with_sink, load(sink + n));
      store(factor + n, end.factor);
      store(lse + n, core::lse_of(end.state));
    }
    if (whole) {
      with_storage(problem.stored_o(), [&](auto storage) {
        using T = decltype(storage);
        T* rows[kTile];
        for (int i = 0; i < kTile; ++i) {
          const int r = tile.first + i;
          rows[i] = static_cast<T*>(tensors.o.data) +
                    map.offset(tensors.o, scratch.query[r], scratch.head[r]);
        }
        lanes_to_rows(output(t), problem.head_dim_v, factor, tile.lanes, rows);
      });
      write_lse(tile, lse);
    } else {
      write_split(t, factor, lse);
    }
  }

 private:
  static ForwardScratch scratch_of(const Call& call, int worker) {
    Workspace workspace(call.scratch(worker));
    return layout_forward_scratch(workspace, call.plan);
  }

  /// Fills in the sub-tiles and, for every row, its query, its head and the keys it sees.
  void place_rows(std::int64_t first, int count) {
    num_tiles = core::ceil_div(count, K.tile_m);
    RowMap::Row row = map.at(first);
    for (int r = 0; r < num_tiles * K.tile_m; ++r) {
      scratch.query[r] = row.query;
      scratch.head[r] = map.head_of(row);
      scratch.first_key[r] = map.mask.begin_of(row.query);
      scratch.last_key[r] = map.mask.end_of(row.query);
      if (map.mask.tree != nullptr) {
        const std::uint64_t word = map.mask.tree[row.query];
        scratch.tree[r] = static_cast<std::uint32_t>(word);
        scratch.tree[plan.work.block_m + r] = static_cast<std::uint32_t>(word >> 32);
      }
      if (r + 1 < count) row = map.next(row);
    }
    for (int t = 0; t < num_tiles; ++t) {
      SubTile& tile = tiles[t];
      tile.first = t * K.tile_m;
      tile.lanes = core::min(K.tile_m, count - tile.first);
      tile.queries = {scratch.query[tile.first], scratch.query[tile.first + tile.lanes - 1] + 1};
      const core::KeyRuns own = map.mask.runs_of(tile.queries).among(keys);
      tile.sinks = own.sinks;
      tile.keys = own.keys;
      tile.first_lanes_end = map.mask.end_of(scratch.query[tile.first + kTile - kLanes - 1]);
      for (int i = tile.first; i < tile.first + K.tile_m; ++i) {
        scratch.max[i] = -core::kInfinity;
        scratch.sum[i] = 0.0F;
      }
      tile.started = false;
    }
  }

  /// Vectors of a transposed query: one an element, or one a pair.
  std::int64_t query_steps() const {
    const std::int64_t columns = multiplied_columns(K, problem);
    return kPairs ? core::ceil_div<std::int64_t>(columns, 2) : columns;
  }

  /// n columns of q or qv. fp32 ones are scaled on their way, bf16 ones would be rounded again.
  void load_columns(int t, const ConstTensor& tensor, std::int64_t n, Word* out) const {
    with_widened_storage<K>(problem.dtype, [&](auto storage) {
      using T = decltype(storage);
      const T* rows[kTile];
      for (int i = 0; i < kTile; ++i) {
        rows[i] =
            reinterpret_cast<const T*>(row_address(tensor, tiles[t].first + i, problem.dtype));
      }
      if constexpr (kPairs) {
        rows_to_lane_pairs(rows, n, out);
      } else if (is_scaled(problem.dtype)) {
        float factor[kTile];
        query_factors(t, factor);
        rows_to_lanes(rows, n, factor, out);
      } else {
        rows_to_lanes(rows, n, plan.score.pre, out);
      }
    });
  }

  /// What each row's elements are multiplied by: the scale of scores, times their own (S14).
  void query_factors(int t, float (&factor)[kTile]) const {
    const core::Scales scales = q_scales_of(problem, tensors);
    for (int i = 0; i < kTile; ++i) {
      const int r = tiles[t].first + i;
      const int head = scales.by == Scaling::token ? scratch.head[r] : map.head_k;
      factor[i] = plan.score.pre * scales.of(map.sequence, head)[scales.index_of(scratch.query[r])];
    }
  }

  /// The column that meets the keys' 1: a row's shift.
  void load_shifts(int t, float* column) const {
    const core::Scales shift = score_shift_of(problem, tensors);
    for (int i = 0; i < kTile; ++i) {
      const int r = tiles[t].first + i;
      column[i] = plan.score.pre * shift.of(map.sequence, scratch.head[r])[scratch.query[r]];
    }
  }

  template <class T>
  const std::byte* row_address(const T& tensor, int r, Dtype dtype) const {
    return static_cast<const std::byte*>(tensor.data) +
           map.offset(tensor, scratch.query[r], scratch.head[r]) * size_of(dtype);
  }

  void write_lse(const SubTile& tile, const float (&lse)[kTile]) const {
    if (tensors.softmax_lse == nullptr) return;
    for (int i = 0; i < tile.lanes; ++i) {
      const int r = tile.first + i;
      tensors.softmax_lse[map.lse_index(scratch.query[r], scratch.head[r])] = lse[i];
    }
  }

  void write_split(int t, const float (&factor)[kTile], const float (&lse)[kTile]) const {
    const SubTile& tile = tiles[t];
    const std::int64_t part = item.split * map.split_rows();
    float* rows[kTile];
    for (int i = 0; i < kTile; ++i) {
      const int r = tile.first + i;
      const std::int64_t row = part + map.split_row(scratch.query[r], scratch.head[r]);
      rows[i] = splits.o + row * problem.head_dim_v;
      if (i < tile.lanes) splits.lse[row] = lse[i];
    }
    lanes_to_rows(output(t), problem.head_dim_v, factor, tile.lanes, rows);
  }
};

}  // namespace tessera::cpu::TESSERA_ISA
