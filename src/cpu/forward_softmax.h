// The forward's softmax: products of a block of keys become weights, and what a row sees of them
// goes into its sum.
//
// The softmax shift of a row is not its running maximum but a reference that is left alone until a
// block's weights exceed it by kSlack powers of two: any shift gives the same quotient, so weights
// need no second pass over the scores and O is almost never rescaled. Softmax{reference, sum} is a
// state for core::combine like any other.
#pragma once

#include "core/philox.h"
#include "cpu/extras.h"
#include "cpu/forward_rows.h"
#include "cpu/math.h"

namespace tessera::cpu::TESSERA_ISA {

inline constexpr float kSlack = core::kCpuSlack;

/// Rows m and m + 1 of P^T, m even. There is room for one row more than there are keys.
TESSERA_INLINE void store_weights(std::uint32_t* out, std::int64_t m, const F32 (&x)[2][kNV]) {
#pragma GCC unroll 8
  for (int n = 0; n < kNV; ++n) {
    store(out + m / 2 * kTile + n * kLanes, pair_bf16(x[0][n], x[1][n]));
  }
}
TESSERA_INLINE void store_weights(float* out, std::int64_t m, const F32 (&x)[2][kNV]) {
#pragma GCC unroll 8
  for (int n = 0; n < kNV; ++n) {
    store(out + m * kTile + n * kLanes, x[0][n]);
    store(out + (m + 1) * kTile + n * kLanes, x[1][n]);
  }
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

/// Rows that saw nothing before take the maximum of their first scores as reference; true if some
/// row still has none.
[[gnu::noinline]] inline bool find_references(const float* raw, int count, int key,
                                              core::Score score, SubTileState& s) {
  bool fresh = false;
  for (int n = 0; n < kNV; ++n) {
    F32 top(-core::kInfinity);
    for (int i = 0; i < count; ++i) {
      const F32 x = core::score2(score, load(raw + i * kTile + n * kLanes));
      top = max(s.visible(n, key + i, x, F32(-core::kInfinity)), top);
    }
    s.reference[n] = select(s.reference[n] == F32(-core::kInfinity), top, s.reference[n]);
    fresh |= any(s.reference[n] == F32(-core::kInfinity));
  }
  return fresh;
}

/// Epilogue of S^T: weights. With 32 registers a finished block of raw products waits in L1 and
/// turns into weights while the next one is multiplied, two keys after every few steps: the
/// exponential's additions and conversions then fill units that the multiplications leave idle.
/// With 16 that would spill the products under way each time, so weights come from registers.
template <core::Kernel K>
struct ToWeights {
  static constexpr bool kPairs = ForwardRows<K>::kPairs;
  static constexpr bool kWaits = kRegisters == 32;

  SubTileState& state;
  core::Score score;                   ///< scale and nothing else
  core::Range common;                  ///< keys that need no mask
  int key;                             ///< of row 0
  bool fresh;                          ///< some row may have no reference yet
  float* raw;                          ///< [kRowBlock][kTile] products that wait
  typename ForwardRows<K>::Word* out;  ///< P^T
  F32 shift[kNV];
  F32 sum[kNV] = {};
  int waiting = 0;    ///< rows in raw
  int waiting_m = 0;  ///< the first of them

  /// pre: of products of already scaled queries, where they are.
  TESSERA_INLINE ToWeights(const ForwardRows<K>& rows, float pre, int t, SubTileState& rows_state,
                           int first_key)
      : state(rows_state),
        score{pre, 1.0F, false, 0.0F},
        common(rows.common_keys(rows.tiles[t])),
        key(first_key),
        fresh(false),
        raw(rows.scratch.waiting),
        out(rows.weights()) {
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
      x[0][n] = weight<kPairs>(shifted(even[n], n));
      x[1][n] = weight<kPairs>(shifted(odd[n], n));
    }
    const int first = key + m;
    if (first < common.begin || first + 2 > common.end || alone) {
      for (int n = 0; n < kNV; ++n) {
        x[0][n] = state.visible(n, first, x[0][n], F32{});
        x[1][n] = alone ? F32{} : state.visible(n, first + 1, x[1][n], F32{});
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

/// What happens to scores that lie in scratch memory: references that rise, and the general path
/// of scores with extras.
template <core::Kernel K>
class ForwardSoftmax {
  using Rows = ForwardRows<K>;

 public:
  explicit ForwardSoftmax(const Rows& rows)
      : score(rows.plan.score),
        general(extra_of(rows.plan.problem) != core::Extra::none),
        rows_(rows),
        dropout_(core::make_dropout(rows.problem.dropout_p, rows.tensors.philox_seed,
                                    rows.tensors.philox_offset)) {
    if (!Rows::kPairs) score.pre = 1.0F;
  }

  core::Score score;   ///< for products of already scaled queries
  const bool general;  ///< more than scale and mask between product and softmax

  /// Raises the references of the chosen rows to the maximum of the block's scores, whose raw
  /// products are in scratch.scores: rare.
  void raise_to_maximum(int t, core::Range keys, SubTileState& state,
                        const Mask (&chosen)[kNV]) const {
    F32 top[kNV];
    for (F32& x : top) x = F32(-core::kInfinity);
    for (int key = keys.begin; key < keys.end; ++key) {
      const float* raw = rows_.scratch.scores + (key - keys.begin) * kTile;
      for (int n = 0; n < kNV; ++n) {
        const F32 x = core::score2(score, load(raw + n * kLanes));
        top[n] = max(state.visible(n, key, x, F32(-core::kInfinity)), top[n]);
      }
    }
    raise_references(t, state, chosen, top);
  }

  // ---- the general path: softcap, bias, ALiBi, dropout ----

  /// Raw products in scratch.scores become weights there.
  [[gnu::noinline]] void transform(int t, core::Range keys, SubTileState& state) const {
    const SubTile& tile = rows_.tiles[t];
    const Problem& problem = rows_.problem;
    float* scores = rows_.scratch.scores;
    for (int n = 0; problem.bias && n < kNV; ++n) {
      lane_rows().load_bias(tile.first + n * kLanes, keys, rows_.scratch.bias + n * kLanes, kTile);
    }
    F32 slope[kNV], position[kNV], top[kNV];
    for (int n = 0; n < kNV; ++n) {
      lane_rows().load_alibi(tile.first + n * kLanes, keys.begin, slope[n], position[n]);
      top[n] = F32(-core::kInfinity);
    }
    const core::Range common = rows_.common_keys(tile);
    for (int key = keys.begin; key < keys.end; ++key) {
      const int row = key - keys.begin;
      const bool mask = key < common.begin || key >= common.end;
      for (int n = 0; n < kNV; ++n) {
        float* p = scores + row * kTile + n * kLanes;
        F32 x = score_of(problem, score, load(p), rows_.scratch.bias + row * kTile + n * kLanes,
                         slope[n], abs(position[n] - F32(static_cast<float>(row))));
        if (mask) x = state.visible(n, key, x, F32(-core::kInfinity));
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

 private:
  /// Raises the reference to `top` in the chosen rows and rescales what they have gathered.
  void raise_references(int t, SubTileState& s, const Mask (&chosen)[kNV],
                        const F32 (&top)[kNV]) const {
    F32 factor[kNV];
    for (int n = 0; n < kNV; ++n) {
      const F32 raised = select(chosen[n], max(s.reference[n], top[n]), s.reference[n]);
      factor[n] = exp2(s.reference[n] - core::shift_of(raised));
      factor[n] = select(s.reference[n] == raised, F32(1.0F), factor[n]);
      s.reference[n] = raised;
      s.sum[n] *= factor[n];
    }
    if (!rows_.tiles[t].started) return;
    float* o = rows_.output(t);
    for (std::int64_t j = 0; j < rows_.problem.head_dim_v; ++j) {
      for (int n = 0; n < kNV; ++n) {
        float* p = o + j * kTile + n * kLanes;
        store(p, load(p) * factor[n]);
      }
    }
  }

  /// Scores to weights, with dropout; the sum knows nothing of dropout (S1).
  TESSERA_INLINE void exponentiate(int t, core::Range keys, SubTileState& state) const {
    core::Philox4<U32> random[kNV] = {};
    F32 sum[kNV] = {};  // of this block: one long sum would err by more
    for (int key = keys.begin; key < keys.end; key += 2) {
      F32 c[2][kNV];
      for (int i = 0; i < 2; ++i) {
        const bool inside = key + i < keys.end;
        for (int n = 0; n < kNV; ++n) {
          c[i][n] = F32{};
          if (!inside) continue;
          const F32 x = load(rows_.scratch.scores + (key + i - keys.begin) * kTile + n * kLanes);
          c[i][n] = exp2(x - core::shift_of(state.reference[n]));
          sum[n] += c[i][n];
        }
        if (inside && dropout_.active()) {
          if (key + i == keys.begin || (key + i) % core::kPhiloxKeys == 0) {
            for (int n = 0; n < kNV; ++n) {
              random[n] = lane_rows().draw(dropout_, rows_.tiles[t].first + n * kLanes, key + i);
            }
          }
          for (int n = 0; n < kNV; ++n) {
            c[i][n] = select(core::dropout_keeps(dropout_, random[n], key + i),
                             c[i][n] * F32(dropout_.keep_scale), F32{});
          }
        }
      }
      const std::int64_t row = key - keys.begin;
      store_weights(rows_.weights(), row, c);
    }
    for (int n = 0; n < kNV; ++n) state.sum[n] += sum[n];
  }

  LaneRows lane_rows() const { return {rows_.map, rows_.scratch.query, rows_.scratch.head}; }

  const Rows& rows_;
  const core::Dropout dropout_;
};

}  // namespace tessera::cpu::TESSERA_ISA
