// The forward tile kernel. A work item is up to block_m packed query rows of one (batch, key/value
// head); they lie in sub-tiles of kTile rows, one row a SIMD lane, and all sub-tiles walk over the
// same blocks of keys. Scores are S^T = K Q^T [key][row] and outputs O^T += V^T P^T
// [head_dim][row]: K and V are broadcast, from where they lie or a copy (next_block.h), row maxima
// and sums are lane-wise and need no reduction.
//
// The softmax shift of a row is not its running maximum but a reference that is left alone until a
// block's weights exceed it by kSlack powers of two: any shift gives the same quotient, so weights
// need no second pass over the scores and O is almost never rescaled. Softmax{reference, sum} is a
// state for core::combine like any other.
//
// What a row does not see has weight 0. Keys that no row of the item sees are not read; a NaN or
// infinite value of a key that some row of a sub-tile sees and another does not reaches both, as
// 0 * NaN.
#pragma once

#include "core/philox.h"
#include "core/softmax.h"
#include "cpu/combine.h"
#include "cpu/extras.h"
#include "cpu/math.h"
#include "cpu/next_block.h"
#include "cpu/pack.h"
#include "cpu/product.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

/// log2 of what a weight may reach before the reference is raised.
inline constexpr float kSlack = 30.0F;

/// kTile rows: one SIMD lane each. The rows past `lanes` repeat the last one.
struct SubTile {
  int first = 0;  ///< of the item's rows
  int lanes = 0;
  core::Range queries;
  core::Range keys;      ///< that at least one of the rows sees, inside the item's split
  int first_lanes_end;   ///< where the keys end that rows outside the last vector see
  bool started = false;  ///< its output holds something
};

template <core::Kernel K>
class ForwardItem {
  static_assert(K.tile_m == kTile && K.lanes == kLanes && K.block_m % K.tile_m == 0);
  static_assert(K.block_n % 2 == 0);

 public:
  ForwardItem(const Call& call, const core::WorkItem& item, int worker)
      : plan_(call.plan),
        problem_(call.plan.problem),
        tensors_(call.tensors),
        splits_(call.layout.splits),
        item_(item),
        map_(call, item.batch, item.head_k),
        band_(band_of(problem_, map_.sequence)),
        score_(call.plan.score),
        general_(score_.capped || problem_.bias || problem_.alibi != PerHead::none ||
                 problem_.dropout_p > 0.0F),
        dropout_(
            core::make_dropout(problem_.dropout_p, tensors_.philox_seed, tensors_.philox_offset)),
        scratch_(scratch_of(call, worker)),
        next_(problem_, tensors_, map_, scratch_, plan_.device.l2_bytes) {
    // fp32 queries are scaled while they are transposed, bf16 ones would be rounded again.
    if (!kPairs) score_.pre = 1.0F;
  }

  void run() {
    const int block_m = plan_.grid.block_m;
    const std::int64_t first = std::int64_t{item_.row_block} * block_m;
    const int count = static_cast<int>(core::min<std::int64_t>(block_m, map_.rows.count() - first));
    if (count <= 0) return;
    keys_ = core::split_keys(band_.keys_of(map_.rows.queries_of(first, first + count)), item_.split,
                             plan_.split_n);
    place_rows(first, count);
    wanted_q_ = rows_of(tiles_[0]);
    while (!wanted_q_.empty()) ask_for_query();
    block_ = block_at(keys_.begin);
    next_.begin(block_);
    next_.ask_all();
    for (; !block_.empty(); block_ = block_at(block_.end)) {
      next_.finish();
      key_rows_ = next_.keys();
      value_rows_ = next_.values();
      next_.begin(block_at(block_.end));
      for (int t = 0; t < num_tiles_; ++t) {
        if (block_.begin == keys_.begin) {
          load_queries(t);
          if (t + 1 < num_tiles_) wanted_q_ = rows_of(tiles_[t + 1]);
        }
        const bool writes = block_.end == keys_.end && plan_.grid.splits <= 1;
        if (writes) wanted_o_ = rows_of(tiles_[t]);
        attend(t);
        if (block_.end == keys_.end) write(t);
      }
    }
    if (keys_.empty()) {
      for (int t = 0; t < num_tiles_; ++t) write(t);
    }
  }

 private:
  static constexpr bool kPairs = K.operand == core::Operand::bf16;
  static constexpr int kTiles = K.block_m / K.tile_m;
  using Element = typename NextBlock<K>::Key;
  using Broadcast = typename NextBlock<K>::Value;  // lanes of Q and P, too
  using Lanes = std::conditional_t<kPairs, U32, F32>;

  static ForwardScratch scratch_of(const Call& call, int worker) {
    Workspace workspace(call.scratch(worker));
    return layout_forward_scratch(workspace, call.plan);
  }

  /// The block that begins at `key`, empty from the end of the keys on.
  core::Range block_at(int key) const { return {key, core::min(key + K.block_n, keys_.end)}; }

  // ---- work ahead, between the products: requests and copies for what comes next ----

  /// Called after every few rows of O^T: the longer of the products.
  TESSERA_INLINE void work_ahead() {
    if (next_.pending() || !wanted_q_.empty() || !wanted_o_.empty()) step_ahead();
  }

  [[gnu::noinline]] void step_ahead() {
    if (next_.pending()) next_.step();
    for (int i = 0; i < next_.rows() && !wanted_q_.empty(); ++i) ask_for_query();
    for (int i = 0; i < next_.rows() && !wanted_o_.empty(); ++i) ask_for_output();
  }

  /// The tile's rows of q or o that are still to be asked for.
  static core::Range rows_of(const SubTile& tile) { return {tile.first, tile.first + tile.lanes}; }

  void ask_for_query() {
    prefetch_row<Access::read>(row_address(tensors_.q, wanted_q_.begin++, problem_.dtype),
                               problem_.head_dim * size_of(problem_.dtype));
  }
  void ask_for_output() {
    prefetch_row<Access::write>(row_address(tensors_.o, wanted_o_.begin++, problem_.stored_o()),
                                problem_.head_dim_v * size_of(problem_.stored_o()));
  }

  template <class T>
  const std::byte* row_address(const T& tensor, int r, Dtype dtype) const {
    return static_cast<const std::byte*>(tensor.data) +
           map_.offset(tensor, scratch_.query[r], scratch_.head[r]) * size_of(dtype);
  }

  // ---- geometry ----

  /// Fills in the sub-tiles and, for every row, its query, its head and the keys it sees.
  void place_rows(std::int64_t first, int count) {
    num_tiles_ = core::ceil_div(count, K.tile_m);
    RowMap::Row row = map_.at(first);
    for (int r = 0; r < num_tiles_ * K.tile_m; ++r) {
      const core::Range keys = band_.keys_of(row.query);
      scratch_.query[r] = row.query;
      scratch_.head[r] = map_.head_of(row);
      scratch_.first_key[r] = keys.begin;
      scratch_.last_key[r] = keys.end;
      if (r + 1 < count) row = map_.next(row);
    }
    for (int t = 0; t < num_tiles_; ++t) {
      SubTile& tile = tiles_[t];
      tile.first = t * K.tile_m;
      tile.lanes = core::min(K.tile_m, count - tile.first);
      tile.queries = {scratch_.query[tile.first], scratch_.query[tile.first + tile.lanes - 1] + 1};
      tile.keys = core::intersect(band_.keys_of(tile.queries), keys_);
      tile.first_lanes_end =
          band_.keys_of({tile.queries.begin, scratch_.query[tile.first + kTile - kLanes - 1] + 1})
              .end;
      for (int i = tile.first; i < tile.first + K.tile_m; ++i) {
        scratch_.max[i] = -core::kInfinity;
        scratch_.sum[i] = 0.0F;
      }
      tile.started = false;
    }
  }

  float* output(int t) const { return scratch_.o + t * problem_.head_dim_v * K.tile_m; }
  Broadcast* queries(int t) const {
    return reinterpret_cast<Broadcast*>(scratch_.q) + t * query_steps() * K.tile_m;
  }
  /// Vectors of a transposed query: one an element, or one a pair.
  std::int64_t query_steps() const {
    return kPairs ? core::ceil_div<std::int64_t>(problem_.head_dim, 2) : problem_.head_dim;
  }

  void load_queries(int t) {
    with_tensor_storage<K>(problem_.dtype, [&](auto storage) {
      using T = decltype(storage);
      const T* rows[kTile];
      for (int i = 0; i < kTile; ++i) {
        const int r = tiles_[t].first + i;
        rows[i] = static_cast<const T*>(tensors_.q.data) +
                  map_.offset(tensors_.q, scratch_.query[r], scratch_.head[r]);
      }
      if constexpr (!kPairs) {
        rows_to_lanes(rows, problem_.head_dim, plan_.score.pre, queries(t));
      } else {
        rows_to_lane_pairs(rows, problem_.head_dim, queries(t));
      }
    });
  }

  // ---- scores to weights ----

  /// Lane limits of a sub-tile, and what its rows have seen so far.
  struct State {
    I32 first[kNV], last[kNV];
    F32 reference[kNV], sum[kNV];
  };

  State load_state(int t) const {
    State s;
    for (int n = 0; n < kNV; ++n) {
      const int r = tiles_[t].first + n * kLanes;
      s.first[n] = load(scratch_.first_key + r);
      s.last[n] = load(scratch_.last_key + r);
      s.reference[n] = load(scratch_.max + r);
      s.sum[n] = load(scratch_.sum + r);
    }
    return s;
  }

  void store_state(int t, const State& s) const {
    for (int n = 0; n < kNV; ++n) {
      const int r = tiles_[t].first + n * kLanes;
      store(scratch_.max + r, s.reference[n]);
      store(scratch_.sum + r, s.sum[n]);
    }
  }

  /// x where the row sees the key.
  TESSERA_INLINE static F32 visible(const State& s, int n, int key, F32 x, F32 otherwise) {
    return select((s.first[n] <= I32(key)) & (I32(key) < s.last[n]), x, otherwise);
  }

  /// Keys that every row of the sub-tile sees.
  TESSERA_INLINE core::Range common_keys(const SubTile& tile) const {
    return core::intersect(band_.keys_of(tile.queries.begin), band_.keys_of(tile.queries.end - 1));
  }

  /// Epilogue of S^T: weights. With 32 registers a finished block of raw products waits in L1 and
  /// turns into weights while the next one is multiplied, two keys after every few steps: the
  /// exponential's additions and conversions then fill units that the multiplications leave idle.
  /// With 16 that would spill the products under way each time, so weights come from registers.
  struct ToWeights {
    static constexpr bool kWaits = kRegisters == 32;

    State& state;
    core::Score score;   ///< scale and nothing else
    core::Range common;  ///< keys that need no mask
    int key;             ///< of row 0
    bool fresh;          ///< some row may have no reference yet
    float* raw;          ///< [kRowBlock][kTile] products that wait
    Broadcast* out;      ///< P^T
    F32 shift[kNV];
    F32 sum[kNV] = {};
    int waiting = 0;    ///< rows in raw
    int waiting_m = 0;  ///< the first of them

    TESSERA_INLINE ToWeights(const ForwardItem& item, int t, State& rows, int first_key)
        : state(rows),
          score{item.score_.pre, 1.0F, false, 0.0F},
          common(item.common_keys(item.tiles_[t])),
          key(first_key),
          fresh(false),
          raw(item.scratch_.waiting),
          out(item.weights()) {
      for (int n = 0; n < kNV; ++n) {
        fresh |= any(state.reference[n] == F32(-core::kInfinity));
        shift[n] = core::shift_of(state.reference[n]);
      }
    }

    template <int MR>
    TESSERA_INLINE void block(std::int64_t m, F32 (&c)[MR][kNV]) {
      const int first = static_cast<int>(m);
      if (kWaits || fresh) {
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
          for (int n = 0; n < kNV; ++n) store(raw + i * kTile + n * kLanes, c[i][n]);
        }
      }
      if (fresh) {
        fresh = find_references(raw, MR, key + first, score, state);
        for (int n = 0; n < kNV; ++n) shift[n] = core::shift_of(state.reference[n]);
      }
      if constexpr (kWaits) {
        waiting = MR;
        waiting_m = first;
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < MR; i += 2) {
          const bool alone = i + 1 == MR;
          weigh(first + i, c[i], c[alone ? i : i + 1], alone);
        }
      }
    }

    TESSERA_INLINE int pieces() const { return (waiting + 1) / 2; }

    /// Rows 2 * number and 2 * number + 1 of those that wait.
    TESSERA_INLINE void piece(int number) {
      const int row = 2 * number;
      F32 x[2][kNV];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 8
        for (int n = 0; n < kNV; ++n) x[i][n] = load(raw + (row + i) * kTile + n * kLanes);
      }
      weigh(waiting_m + row, x[0], x[1], row + 1 == waiting);
    }

    /// Rows m, which is even, and m + 1 of S^T; `alone`: the second does not exist.
    TESSERA_INLINE void weigh(int m, const F32 (&even)[kNV], const F32 (&odd)[kNV], bool alone) {
      F32 x[2][kNV];
#pragma GCC unroll 8
      for (int n = 0; n < kNV; ++n) {
        x[0][n] = weight(shifted(even[n], n));
        x[1][n] = weight(shifted(odd[n], n));
      }
      const int first = key + m;
      if (first < common.begin || first + 2 > common.end || alone) {
        for (int n = 0; n < kNV; ++n) {
          x[0][n] = visible(state, n, first, x[0][n], F32{});
          x[1][n] = alone ? F32{} : visible(state, n, first + 1, x[1][n], F32{});
        }
      }
#pragma GCC unroll 8
      for (int n = 0; n < kNV; ++n) sum[n] += x[0][n] + x[1][n];
      store_weights(out, m, x);
    }

    /// log2 of a weight. fp32 queries are scaled already.
    TESSERA_INLINE F32 shifted(F32 qk, int n) const {
      if constexpr (kPairs) {
        return fms(qk, F32(score.pre), shift[n]);
      } else {
        return qk - shift[n];
      }
    }

    /// To be called after the product.
    TESSERA_INLINE void flush() {
      for (int i = 0; i < pieces(); ++i) piece(i);
    }
  };

  /// Rows that saw nothing before take the maximum of their first scores as reference; true if some
  /// row still has none.
  [[gnu::noinline]] static bool find_references(const float* raw, int count, int key,
                                                core::Score score, State& s) {
    bool fresh = false;
    for (int n = 0; n < kNV; ++n) {
      F32 top(-core::kInfinity);
      for (int i = 0; i < count; ++i) {
        const F32 x = core::score2(score, load(raw + i * kTile + n * kLanes));
        top = max(visible(s, n, key + i, x, F32(-core::kInfinity)), top);
      }
      s.reference[n] = select(s.reference[n] == F32(-core::kInfinity), top, s.reference[n]);
      fresh |= any(s.reference[n] == F32(-core::kInfinity));
    }
    return fresh;
  }

  /// Epilogue of S^T: raw products.
  struct ToScores {
    float* out;

    template <int MR>
    TESSERA_INLINE void block(std::int64_t m, F32 (&c)[MR][kNV]) {
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        for (int n = 0; n < kNV; ++n) store(out + (m + i) * kTile + n * kLanes, c[i][n]);
      }
    }
  };

  /// Epilogue of O^T.
  struct AddToOutput {
    ForwardItem& item;
    float* out;
    bool started;

    template <int MR>
    TESSERA_INLINE void block(std::int64_t m, F32 (&c)[MR][kNV]) {
      float* rows = out + m * kTile;
      if (started) {
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
          for (int n = 0; n < kNV; ++n) c[i][n] += load(rows + i * kTile + n * kLanes);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
        for (int n = 0; n < kNV; ++n) store(rows + i * kTile + n * kLanes, c[i][n]);
      }
      item.work_ahead();
    }
  };

  /// Weights are rounded to V's type for the second product, so bf16 needs no better.
  TESSERA_INLINE static F32 weight(F32 x) {
    if constexpr (kPairs) {
      return exp2_short(x);
    } else {
      return exp2(x);
    }
  }

  Broadcast* weights() const { return reinterpret_cast<Broadcast*>(scratch_.scores); }

  /// Rows m and m + 1 of P^T, m even. There is room for one row more than there are keys.
  TESSERA_INLINE static void store_weights(Broadcast* out, std::int64_t m, const F32 (&x)[2][kNV]) {
#pragma GCC unroll 8
    for (int n = 0; n < kNV; ++n) {
      if constexpr (kPairs) {
        store(out + m / 2 * kTile + n * kLanes, pair_bf16(x[0][n], x[1][n]));
      } else {
        store(out + m * kTile + n * kLanes, x[0][n]);
        store(out + (m + 1) * kTile + n * kLanes, x[1][n]);
      }
    }
  }

  /// Raises the reference to `top` in the chosen rows and rescales what they have gathered.
  void raise_references(int t, State& s, const Mask (&chosen)[kNV], const F32 (&top)[kNV]) const {
    F32 factor[kNV];
    for (int n = 0; n < kNV; ++n) {
      const F32 raised = select(chosen[n], max(s.reference[n], top[n]), s.reference[n]);
      factor[n] = exp2(s.reference[n] - core::shift_of(raised));
      factor[n] = select(s.reference[n] == raised, F32(1.0F), factor[n]);
      s.reference[n] = raised;
      s.sum[n] *= factor[n];
    }
    if (!tiles_[t].started) return;
    float* o = output(t);
    for (std::int64_t j = 0; j < problem_.head_dim_v; ++j) {
      for (int n = 0; n < kNV; ++n) {
        float* p = o + j * kTile + n * kLanes;
        store(p, load(p) * factor[n]);
      }
    }
  }

  /// One sub-tile against one block of keys.
  void attend(int t) {
    const SubTile& tile = tiles_[t];
    core::Range keys = core::intersect(tile.keys, block_);
    if (keys.empty()) return;
    // Pairs of values are counted from the block's first key.
    if (kPairs) keys.begin -= (keys.begin - block_.begin) & 1;
    State state = load_state(t);
    if (general_) {
      multiply_to_scores(t, keys);
      transform(t, keys, state);
    } else {
      weigh(t, keys, state);
    }
    store_state(t, state);
    multiply_values(t, keys);
    tiles_[t].started = true;
  }

  /// How many of the last keys only the last vector of rows sees: what a diagonal cuts off. Even
  /// numbers of keys come before them.
  TESSERA_INLINE int last_only(int t, core::Range keys) const {
    const int first = core::max(tiles_[t].first_lanes_end, keys.begin);
    return core::max(0, keys.size() - core::round_up(first - keys.begin, 2));
  }

  /// Epilogue of a product of the last vector of rows: completes the vectors.
  template <class Epilogue>
  struct LastLanes {
    Epilogue& epilogue;
    std::int64_t first;  ///< row of C

    template <int MR>
    TESSERA_INLINE void block(std::int64_t m, F32 (&c)[MR][1]) {
      F32 all[MR][kNV];
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        for (int n = 0; n < kNV; ++n) all[i][n] = n + 1 < kNV ? F32{} : c[i][0];
      }
      epilogue.block(first + m, all);
    }
    TESSERA_INLINE int pieces() const
      requires requires(Epilogue& e) { e.pieces(); }
    {
      return epilogue.pieces();
    }
    TESSERA_INLINE void piece(int number) { epilogue.piece(number); }
  };

  /// S^T for the keys; where nobody outside the last vector of rows sees a key, only that one's.
  template <class Epilogue>
  TESSERA_INLINE void multiply_keys(int t, core::Range keys, Epilogue&& epilogue) const {
    const int last = last_only(t, keys);
    const Rows<Element> rows = key_rows_.from(keys.begin - block_.begin);
    const int count = keys.size() - last;
    product(count, problem_.head_dim, rows, queries(t), kTile, epilogue);
    if (last == 0) return;
    using Wrapped = LastLanes<std::remove_reference_t<Epilogue>>;
    product<1>(last, problem_.head_dim, rows.from(count), queries(t) + kTile - kLanes, kTile,
               Wrapped{epilogue, count});
  }

  /// O^T += V^T P^T.
  [[gnu::noinline]] void multiply_values(int t, core::Range keys) {
    const int first = (keys.begin - block_.begin) / (kPairs ? 2 : 1);
    float* o = output(t);
    product(problem_.head_dim_v, keys.size(),
            Columns<Broadcast>{value_rows_.data + first * value_rows_.stride, value_rows_.stride},
            weights(), kTile, AddToOutput{*this, o, tiles_[t].started}, last_only(t, keys));
  }

  /// Nothing but scale and mask between the products: P^T comes out of the first one's registers.
  void weigh(int t, core::Range keys, State& state) const {
    F32 sum[kNV];
    multiply_to_weights(t, keys, state, sum);
    Mask exceeded[kNV];
    bool redo = false;
    for (int n = 0; n < kNV; ++n) {
      exceeded[n] = ~(sum[n] <= F32(__builtin_exp2f(kSlack)));
      redo |= any(exceeded[n]);
    }
    if (redo) {
      raise_to_maximum(t, keys, state, exceeded);
      multiply_to_weights(t, keys, state, sum);
    }
    for (int n = 0; n < kNV; ++n) state.sum[n] += sum[n];
  }

  [[gnu::noinline]] void multiply_to_weights(int t, core::Range keys, State& state,
                                             F32 (&sum)[kNV]) const {
    ToWeights epilogue(*this, t, state, keys.begin);
    multiply_keys(t, keys, epilogue);
    epilogue.flush();
    for (int n = 0; n < kNV; ++n) sum[n] = epilogue.sum[n];
  }

  [[gnu::noinline]] void multiply_to_scores(int t, core::Range keys) const {
    multiply_keys(t, keys, ToScores{scratch_.scores});
  }

  /// Raises the references of the chosen rows to the maximum of the block's scores: rare.
  [[gnu::noinline]] void raise_to_maximum(int t, core::Range keys, State& state,
                                          const Mask (&chosen)[kNV]) const {
    multiply_to_scores(t, keys);
    F32 top[kNV];
    for (F32& x : top) x = F32(-core::kInfinity);
    for (int key = keys.begin; key < keys.end; ++key) {
      const float* raw = scratch_.scores + (key - keys.begin) * kTile;
      for (int n = 0; n < kNV; ++n) {
        const F32 x = core::score2(score_, load(raw + n * kLanes));
        top[n] = max(visible(state, n, key, x, F32(-core::kInfinity)), top[n]);
      }
    }
    raise_references(t, state, chosen, top);
  }

  // ---- the general path: softcap, bias, ALiBi, dropout ----

  /// Raw products in scratch_.scores become weights there.
  [[gnu::noinline]] void transform(int t, core::Range keys, State& state) {
    const SubTile& tile = tiles_[t];
    float* scores = scratch_.scores;
    if (problem_.bias) load_bias(t, keys);
    F32 slope[kNV], position[kNV], top[kNV];
    for (int n = 0; n < kNV; ++n) {
      lane_rows().load_alibi(tile.first + n * kLanes, keys.begin, slope[n], position[n]);
      top[n] = F32(-core::kInfinity);
    }
    const core::Range common = common_keys(tile);
    for (int key = keys.begin; key < keys.end; ++key) {
      const int row = key - keys.begin;
      const bool mask = key < common.begin || key >= common.end;
      for (int n = 0; n < kNV; ++n) {
        float* p = scores + row * kTile + n * kLanes;
        F32 x = core::score2(score_, load(p));
        const F32 bias = problem_.bias ? load(scratch_.bias + row * kTile + n * kLanes) : F32{};
        x = core::add_to_score(x, problem_.bias.has_value(), bias, problem_.alibi != PerHead::none,
                               slope[n], abs(position[n] - F32(static_cast<float>(row))));
        if (mask) x = visible(state, n, key, x, F32(-core::kInfinity));
        top[n] = max(x, top[n]);
        store(p, x);
      }
    }
    Mask exceeded[kNV];
    bool raise = false;
    for (int n = 0; n < kNV; ++n) {
      exceeded[n] = top[n] > state.reference[n] + F32(kSlack);
      raise |= any(exceeded[n]);
    }
    if (raise) raise_references(t, state, exceeded, top);
    exponentiate(t, keys, state);
  }

  /// Scores to weights, with dropout; the sum knows nothing of dropout (S1).
  TESSERA_INLINE void exponentiate(int t, core::Range keys, State& state) const {
    core::Philox4<U32> random[kNV] = {};
    F32 sum[kNV] = {};  // of this block: one long sum would err by more
    for (int key = keys.begin; key < keys.end; key += 2) {
      F32 c[2][kNV];
      for (int i = 0; i < 2; ++i) {
        const bool inside = key + i < keys.end;
        for (int n = 0; n < kNV; ++n) {
          c[i][n] = F32{};
          if (!inside) continue;
          const F32 score = load(scratch_.scores + (key + i - keys.begin) * kTile + n * kLanes);
          c[i][n] = exp2(score - core::shift_of(state.reference[n]));
          sum[n] += c[i][n];
        }
        if (inside && dropout_.active()) {
          if (key + i == keys.begin || (key + i) % core::kPhiloxKeys == 0) {
            for (int n = 0; n < kNV; ++n) {
              random[n] = lane_rows().draw(dropout_, tiles_[t].first + n * kLanes, key + i);
            }
          }
          for (int n = 0; n < kNV; ++n) {
            c[i][n] = select(kept(dropout_, random[n], key + i), c[i][n] * F32(dropout_.keep_scale),
                             F32{});
          }
        }
      }
      const std::int64_t row = key - keys.begin;
      store_weights(weights(), row, c);
    }
    for (int n = 0; n < kNV; ++n) state.sum[n] += sum[n];
  }

  LaneRows lane_rows() const { return {map_, scratch_.query, scratch_.head}; }

  /// The bias of a sub-tile, in base 2, into scratch_.bias [key][row].
  void load_bias(int t, core::Range keys) const {
    const std::int64_t stride_key = map_.bias_key_stride();
    with_storage(problem_.bias->dtype, [&](auto storage) {
      using T = decltype(storage);
      const T* rows[kTile];
      for (int i = 0; i < kTile; ++i) {
        rows[i] = lane_rows().template bias<T>(tiles_[t].first + i, keys.begin);
      }
      if (stride_key == 1) {
        rows_to_lanes(rows, keys.size(), core::kLog2e, scratch_.bias);
      } else {
        for (int key = 0; key < keys.size(); ++key) {
          for (int i = 0; i < kTile; ++i) {
            const F32 x = load_n(rows[i] + key * stride_key, 1);
            scratch_.bias[key * kTile + i] = lane(x, 0) * core::kLog2e;
          }
        }
      }
    });
  }

  // ---- results ----

  void write(int t) const {
    const SubTile& tile = tiles_[t];
    if (!tile.started) {
      for (std::int64_t i = 0; i < problem_.head_dim_v * K.tile_m; ++i) output(t)[i] = 0.0F;
    }
    float factor[kTile], lse[kTile], sink[kTile];
    const bool whole = plan_.grid.splits <= 1;
    const bool with_sink = whole && problem_.sink;
    for (int i = 0; i < kTile; ++i) {
      sink[i] = with_sink ? tensors_.sink[scratch_.head[tile.first + i]] : 0.0F;
    }
    for (int n = 0; n < kTile; n += kLanes) {
      const core::Softmax<F32> row = {load(scratch_.max + tile.first + n),
                                      load(scratch_.sum + tile.first + n)};
      core::Softmax<F32> merged = row;
      F32 f = core::inverse_sum(row);
      if (with_sink) {
        merged = core::combine(row, {load(sink + n) * F32(core::kLog2e), F32(1.0F)});
        f = core::weight_of({row.max, F32(1.0F)}, merged);
      }
      store(factor + n, f);
      store(lse + n, core::lse_of(merged));
    }
    if (whole) {
      with_storage(problem_.stored_o(), [&](auto storage) {
        using T = decltype(storage);
        T* rows[kTile];
        for (int i = 0; i < kTile; ++i) {
          const int r = tile.first + i;
          rows[i] = static_cast<T*>(tensors_.o.data) +
                    map_.offset(tensors_.o, scratch_.query[r], scratch_.head[r]);
        }
        lanes_to_rows(output(t), problem_.head_dim_v, factor, tile.lanes, rows);
      });
      write_lse(tile, lse);
    } else {
      write_split(t, factor, lse);
    }
  }

  void write_lse(const SubTile& tile, const float (&lse)[kTile]) const {
    if (tensors_.softmax_lse == nullptr) return;
    for (int i = 0; i < tile.lanes; ++i) {
      const int r = tile.first + i;
      tensors_.softmax_lse[map_.lse_index(scratch_.query[r], scratch_.head[r])] = lse[i];
    }
  }

  void write_split(int t, const float (&factor)[kTile], const float (&lse)[kTile]) const {
    const SubTile& tile = tiles_[t];
    const std::int64_t part = item_.split * map_.split_rows();
    float* rows[kTile];
    for (int i = 0; i < kTile; ++i) {
      const int r = tile.first + i;
      const std::int64_t row = part + map_.split_row(scratch_.query[r], scratch_.head[r]);
      rows[i] = splits_.o + row * problem_.head_dim_v;
      if (i < tile.lanes) splits_.lse[row] = lse[i];
    }
    lanes_to_rows(output(t), problem_.head_dim_v, factor, tile.lanes, rows);
  }

  const PlanData& plan_;
  const Problem& problem_;
  const Tensors& tensors_;
  const SplitLayout& splits_;
  const core::WorkItem item_;
  const RowMap map_;
  const core::Band band_;
  core::Score score_;   ///< for products of already scaled queries
  const bool general_;  ///< more than scale and mask between product and softmax
  const core::Dropout dropout_;
  const ForwardScratch scratch_;
  NextBlock<K> next_;
  core::Range wanted_q_, wanted_o_;  ///< rows of the item to be asked for

  core::Range keys_;   ///< of the item
  core::Range block_;  ///< of keys
  int num_tiles_ = 0;
  SubTile tiles_[kTiles];
  Rows<Element> key_rows_{};  ///< of the block
  Columns<Broadcast> value_rows_{};
};

/// The whole pass.
template <core::Kernel K>
void forward(const Call& call) {
  const core::WorkGrid& grid = call.plan.grid;
  for_each_task(call, grid.count(), [&](std::int64_t index, int worker) {
    ForwardItem<K>(call, grid.item(index), worker).run();
  });
  if (grid.splits > 1) combine_splits(call);
}

}  // namespace tessera::cpu::TESSERA_ISA
