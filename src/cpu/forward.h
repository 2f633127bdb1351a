// The forward tile kernel: the walk. A work item is up to block_m grouped rows of one (batch,
// key/value head); they lie in sub-tiles of kTile rows, one row a SIMD lane (forward_rows.h), and
// all sub-tiles walk over the same blocks of keys. Scores are S^T = K Q^T [key][row] and outputs
// O^T += V^T P^T [head_dim][row]: K and V are broadcast, from where they lie or a copy
// (forward_next_block.h), row maxima and sums are lane-wise and need no reduction. What becomes of
// the scores in between is in forward_softmax.h.
//
// What a row does not see has weight 0. Keys that no row of the item sees are not read; a NaN or
// infinite value of a key that some row of a sub-tile sees and another does not reaches both, as
// 0 * NaN.
#pragma once

#include "cpu/combine.h"
#include "cpu/forward_next_block.h"
#include "cpu/forward_rows.h"
#include "cpu/forward_softmax.h"
#include "cpu/product.h"

namespace tessera::cpu::TESSERA_ISA {

template <core::Kernel K>
class ForwardItem {
  static_assert(K.block_n % 2 == 0);

 public:
  ForwardItem(const Call& call, const core::Work& item, int worker)
      : rows_(call, item, worker),
        softmax_(rows_),
        next_(rows_.problem, rows_.tensors, rows_.map, rows_.scratch, rows_.plan.device.l2_bytes) {}

  void run() {
    if (!rows_.place()) return;
    const core::KeyRuns& keys = rows_.keys;
    wanted_q_ = Item::rows_of(rows_.tiles[0]);
    while (!wanted_q_.empty()) rows_.ask_for_query(wanted_q_.begin++);
    const core::Range first = keys.first(K.block_n);
    next_.begin(first);
    next_.ask_all();
    core::Range following;
    for (block_ = first; !block_.empty(); block_ = following) {
      following = keys.after(block_, K.block_n);
      next_.finish();
      key_rows_ = next_.keys();
      value_rows_ = next_.values();
      next_.begin(following);
      for (int t = 0; t < rows_.num_tiles; ++t) {
        if (block_ == first) {
          rows_.load_queries(t);
          if (t + 1 < rows_.num_tiles) wanted_q_ = Item::rows_of(rows_.tiles[t + 1]);
        }
        const bool writes = following.empty() && rows_.plan.work.splits <= 1;
        if (writes) wanted_o_ = Item::rows_of(rows_.tiles[t]);
        attend(t);
        if (following.empty()) rows_.write(t);
      }
    }
    if (keys.empty()) {
      for (int t = 0; t < rows_.num_tiles; ++t) rows_.write(t);
    }
  }

 private:
  using Item = ForwardRows<K>;
  using Element = typename NextBlock<K>::Key;
  using Word = typename Item::Word;
  static constexpr bool kPairs = Item::kPairs;

  // ---- work ahead, between the products: requests and copies for what comes next ----

  /// Called after every few rows of O^T: the longer of the products.
  TESSERA_INLINE void work_ahead() {
    if (next_.pending() || !wanted_q_.empty() || !wanted_o_.empty()) step_ahead();
  }

  [[gnu::noinline]] void step_ahead() {
    if (next_.pending()) next_.step();
    for (int i = 0; i < next_.rows() && !wanted_q_.empty(); ++i) {
      rows_.ask_for_query(wanted_q_.begin++);
    }
    for (int i = 0; i < next_.rows() && !wanted_o_.empty(); ++i) {
      rows_.ask_for_output(wanted_o_.begin++);
    }
  }

  // ---- one sub-tile against one block of keys ----

  void attend(int t) {
    const SubTile& tile = rows_.tiles[t];
    const bool sinks = block_.begin < rows_.keys.sinks.end;
    core::Range keys = core::intersect(sinks ? tile.sinks : tile.keys, block_);
    if (keys.empty()) return;
    // Pairs of values are counted from the block's first key.
    if (kPairs) keys.begin -= (keys.begin - block_.begin) & 1;
    SubTileState state = rows_.load_state(t);
    if (softmax_.general) {
      multiply_to_scores(t, keys);
      softmax_.transform(t, keys, state);
    } else {
      weigh(t, keys, state);
    }
    rows_.store_state(t, state);
    multiply_values(t, keys);
    rows_.tiles[t].started = true;
  }

  /// Nothing but scale and mask between the products: P^T comes out of the first one's registers.
  void weigh(int t, core::Range keys, SubTileState& state) const {
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

  [[gnu::noinline]] void multiply_to_weights(int t, core::Range keys, SubTileState& state,
                                             F32 (&sum)[kNV]) const {
    ToWeights<K> epilogue(rows_, softmax_.score.pre, t, state, keys.begin);
    multiply_keys(t, keys, epilogue);
    epilogue.flush();
    for (int n = 0; n < kNV; ++n) sum[n] = epilogue.sum[n];
  }

  [[gnu::noinline]] void multiply_to_scores(int t, core::Range keys) const {
    multiply_keys(t, keys, ToScores{rows_.scratch.scores});
  }

  [[gnu::noinline]] void raise_to_maximum(int t, core::Range keys, SubTileState& state,
                                          const Mask (&chosen)[kNV]) const {
    multiply_to_scores(t, keys);
    softmax_.raise_to_maximum(t, keys, state, chosen);
  }

  // ---- products ----

  /// How many of the last keys only the last vector of rows sees: what a diagonal cuts off. Even
  /// numbers of keys come before them.
  TESSERA_INLINE int last_only(int t, core::Range keys) const {
    const int first = core::max(rows_.tiles[t].first_lanes_end, keys.begin);
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
    const std::int64_t columns = multiplied_columns(K, rows_.problem);
    product(count, columns, rows, rows_.queries(t), kTile, epilogue);
    if (last == 0) return;
    using Wrapped = LastLanes<std::remove_reference_t<Epilogue>>;
    product<1>(last, columns, rows.from(count), rows_.queries(t) + kTile - kLanes, kTile,
               Wrapped{epilogue, count});
  }

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

  /// O^T += V^T P^T.
  [[gnu::noinline]] void multiply_values(int t, core::Range keys) {
    const int first = (keys.begin - block_.begin) / (kPairs ? 2 : 1);
    float* o = rows_.output(t);
    product(rows_.problem.head_dim_v, keys.size(),
            Columns<Word>{value_rows_.data + first * value_rows_.stride, value_rows_.stride},
            rows_.weights(), kTile, AddToOutput{*this, o, rows_.tiles[t].started},
            last_only(t, keys));
  }

  Item rows_;
  ForwardSoftmax<K> softmax_;
  NextBlock<K> next_;
  core::Range wanted_q_, wanted_o_;  ///< rows of the item to be asked for

  core::Range block_;         ///< of keys
  Rows<Element> key_rows_{};  ///< of the block
  Columns<Word> value_rows_{};
};

/// The whole pass.
template <core::Kernel K>
void forward(const Call& call) {
  const core::WorkOrder& work = call.plan.work;
  for_each_task(call, work.count(), [&](std::int64_t index, int worker) {
    ForwardItem<K>(call, work.at(index), worker).run();
  });
  if (work.splits > 1) combine_splits(call);
}

}  // namespace tessera::cpu::TESSERA_ISA
