// The gradient of the bias (core::score_gradient), summed over the dimensions that the bias does
// not store. Where every element belongs to one (batch, head, query, key), the unit that computes
// it writes it. Otherwise a pass of its own cuts the bias as stored into tiles: whoever owns a tile
// computes dS again for everything that maps onto it and sums in fp32, in a fixed order, in memory
// of a tile's size.
#pragma once

#include "cpu/backward_rows.h"

namespace tessera::cpu::TESSERA_ISA {

/// Is the gradient wanted, and does every element get exactly one term?
inline bool writes_bias_once(const Problem& p, const Tensors& tensors) {
  if (!p.bias || tensors.dbias.data == nullptr) return false;
  const BiasShape& s = *p.bias;
  return (s.batch || p.batch == 1) && (s.heads || p.num_heads == 1) &&
         (s.queries || p.seqlen_q == 1) && (s.keys || p.seqlen_k == 1);
}

/// data[start[slot] + key * stride_key] = values[key * stride + slot] for `keys` keys and `slots`
/// <= kLanes slots; null values are zeros.
template <class T>
[[gnu::noinline]] void store_bias_lanes(T* data, const std::int64_t (&start)[kLanes], int slots,
                                        std::int64_t stride_key, int keys, const float* values,
                                        std::int64_t stride) {
  for (int key = 0; key < keys; key += kLanes) {
    const int count = core::min(kLanes, keys - key);
    F32 x[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      x[i] = values != nullptr && i < count ? load(values + (key + i) * stride) : F32{};
    }
    transpose(x);
    for (int i = 0; i < slots; ++i) {
      T* out = data + start[i] + key * stride_key;
      if (stride_key == 1 || count == 1) {
        store_n(out, x[i], count);
      } else {
        for (int j = 0; j < count; ++j) store_n(out + j * stride_key, F32(lane(x[i], j)), 1);
      }
    }
  }
}

/// Writes values[key][slot] for keys [first, first + keys) and `slots` slots; place(slot) gives
/// each slot's query and head. Null values are zeros.
template <class Place>
inline void store_bias(const Problem& p, const Tensors& tensors, int batch, int first, int keys,
                       std::int64_t slots, const float* values, std::int64_t stride,
                       const Place& place) {
  const core::BiasStrides strides = strides_of(*p.bias, tensors.dbias);
  for (std::int64_t slot = 0; slot < slots; slot += kLanes) {
    const int count = static_cast<int>(core::min<std::int64_t>(kLanes, slots - slot));
    std::int64_t start[kLanes];
    for (int i = 0; i < count; ++i) {
      const auto [query, head] = place(slot + i);
      start[i] = strides.offset(batch, head, query, first);
    }
    with_storage(p.bias->dtype, [&](auto storage) {
      store_bias_lanes(static_cast<decltype(storage)*>(tensors.dbias.data), start, count,
                       strides.key, keys, values != nullptr ? values + slot : nullptr, stride);
    });
  }
}

/// A query and its head, or stand-ins where the bias does not tell them apart.
struct BiasSlot {
  std::int64_t query;
  std::int64_t head;
};

// ---- every element has one term: called by the unit that owns the keys ----

/// Writes zeros for rows [begin, end) and the block of keys that starts at `first`.
template <class Tile>
void write_zero_bias(const Tile& t, int first, std::int64_t begin, std::int64_t end,
                     const float* values = nullptr) {
  const int keys = static_cast<int>(core::min<std::int64_t>(Tile::kN, t.problem.seqlen_k - first));
  const std::int64_t limit = t.problem.seqlen_q * t.map.rows.group;
  store_bias(t.problem, t.tensors, t.map.batch, first, keys, core::min(end, limit) - begin, values,
             Tile::kM, [&](std::int64_t slot) {
               const RowMap::Row row = t.map.at(begin + slot);
               return BiasSlot{row.query, t.map.head_of(row)};
             });
}

/// Writes the tile that starts at `row`: what gradients() kept, or zeros if it was not seen.
template <class Tile>
void write_bias(const Tile& t, int first, std::int64_t row, bool seen) {
  if (seen) {
    // Keys and rows outside what was computed are zero.
    for (int key = 0; key < Tile::kN; ++key) {
      const bool computed = t.strips.begin <= key && key < t.strips.end;
      for (int r = computed ? t.rows : 0; r < Tile::kM; r += kLanes) {
        store(t.scratch.dp + key * Tile::kM + r, F32{});
      }
    }
  }
  write_zero_bias(t, first, row, row + Tile::kM, seen ? t.scratch.dp : nullptr);
}

// ---- broadcast: a pass of its own ----

template <core::Kernel K>
class BiasGradient {
  using Tile = BackwardTile<K>;
  static constexpr int kM = Tile::kM;
  static constexpr int kN = Tile::kN;

 public:
  explicit BiasGradient(const Call& call)
      : call_(call),
        problem_(call.plan.problem),
        shape_(*problem_.bias),
        group_(problem_.group()),
        tiles_(bias_tiles(problem_, K)) {}

  std::int64_t tasks() const { return tiles_.count(); }

  void run(std::int64_t index, int worker) const {
    std::int64_t at[4];
    for (int i = 3; i >= 0; --i, index /= tiles_.counts[i + 1]) at[i] = index % tiles_.counts[i];
    const auto all = [](bool stored, std::int64_t i, std::int64_t count) {
      return stored ? core::Range{static_cast<int>(i), static_cast<int>(i + 1)}
                    : core::Range{0, static_cast<int>(count)};
    };
    const core::Range batches = all(shape_.batch, at[0], problem_.batch);
    const core::Range heads = all(shape_.heads, at[1], problem_.num_heads_k);
    const core::Range blocks =
        all(shape_.keys, at[3], core::ceil_div<std::int64_t>(problem_.seqlen_k, kN));
    const std::int64_t rows_each = shape_.queries
                                       ? kM * (shape_.heads ? 1 : group_)
                                       : core::max<std::int64_t>(problem_.seqlen_q, 1) * group_;
    const std::int64_t first_row = at[2] * rows_each;

    Workspace workspace(call_.scratch(worker));
    float* sums = layout_backward_scratch(workspace, call_.plan).bias_sum;
    for (std::int64_t i = 0; i < kN * stride(); i += kLanes) store(sums + i, F32{});
    for (int batch = batches.begin; batch < batches.end; ++batch) {
      for (int head = heads.begin; head < heads.end; ++head) {
        Tile tile(call_, batch, head, worker, worker);
        copy_seen_rows(tile, blocks, first_row, first_row + rows_each);
        for (int block = blocks.begin; block < blocks.end; ++block) {
          if (block * kN >= tile.map.sequence.seqlen_k) break;
          tile.load_block(block * kN);
          add_block(tile, first_row, first_row + rows_each, sums);
        }
      }
    }
    write(at, first_row, sums);
  }

 private:
  std::int64_t stride() const {
    return core::round_up<std::int64_t>(core::max<std::int64_t>(kM, group_), kLanes);
  }

  /// Copies those of rows [begin, end) that see any of the key blocks into the worker's own slot.
  void copy_seen_rows(const Tile& tile, core::Range blocks, std::int64_t begin,
                      std::int64_t end) const {
    const std::int64_t last =
        core::min<std::int64_t>(std::int64_t{blocks.end} * kN, tile.map.sequence.seqlen_k);
    const core::Range queries =
        tile.band.queries_of(core::Range{blocks.begin * kN, static_cast<int>(last)});
    const std::int64_t first = core::max(begin, queries.begin * group_ / kM * kM);
    for (std::int64_t row = first; row < core::min(end, queries.end * group_); row += kTile) {
      BackwardRows<K>(tile, row).copy();
    }
  }

  /// Adds what rows [begin, end) contribute to the keys of the tile's block.
  void add_block(Tile& tile, std::int64_t begin, std::int64_t end, float* sums) const {
    const core::Range queries = tile.band.queries_of(tile.block);
    const std::int64_t first = core::max(begin, queries.begin * group_ / kM * kM);
    for (std::int64_t row = first; row < core::min(end, queries.end * group_); row += kM) {
      if (!tile.place(row)) continue;
      tile.scores();
      tile.gradients(true);
      add_tile(tile, begin, sums);
    }
  }

  void add_tile(const Tile& tile, std::int64_t first_row, float* sums) const {
    const bool by_head = shape_.heads && group_ > 1;
    const bool each_row = shape_.queries && (by_head || group_ == 1);
    int slot[kM];
    RowMap::Row row = tile.map.at(tile.row);
    for (int r = 0; r < tile.valid; ++r, row = tile.map.next(row)) {
      slot[r] = shape_.queries ? row.query - tile.map.rows.query_of(first_row)
                : by_head      ? row.member
                               : 0;
    }
    for (int key = tile.strips.begin; key < core::min(tile.strips.end, tile.block.size()); ++key) {
      const float* in = tile.scratch.dp + key * kM;
      float* out = sums + (shape_.keys ? key * stride() : 0);
      if (each_row) {
        for (int r = 0; r < tile.rows; r += kLanes) store(out + r, load(out + r) + load(in + r));
      } else if (!shape_.queries && !by_head) {
        F32 sum{};
        for (int r = 0; r < tile.rows; r += kLanes) sum += load(in + r);
        out[0] += reduce_add(sum);
      } else {
        for (int r = 0; r < tile.valid; ++r) out[slot[r]] += in[r];
      }
    }
  }

  void write(const std::int64_t (&at)[4], std::int64_t first_row, const float* sums) const {
    const std::int64_t first_key = shape_.keys ? at[3] * kN : 0;
    const std::int64_t keys =
        shape_.keys ? core::min<std::int64_t>(kN, problem_.seqlen_k - first_key) : 1;
    const std::int64_t first_head = at[1] * group_;
    std::int64_t slots = 1;
    if (shape_.queries) {
      const std::int64_t each = shape_.heads ? 1 : group_;
      slots = core::min<std::int64_t>(kM, (problem_.seqlen_q * group_ - first_row) / each);
    } else if (shape_.heads) {
      slots = group_;
    }
    store_bias(problem_, call_.tensors, static_cast<int>(at[0]), static_cast<int>(first_key),
               static_cast<int>(keys), slots, sums, stride(), [&](std::int64_t slot) {
                 if (shape_.queries && shape_.heads) {
                   const std::int64_t row = first_row + slot;
                   return BiasSlot{row / group_, first_head + row % group_};
                 }
                 return BiasSlot{shape_.queries ? first_row / group_ + slot : 0,
                                 first_head + (shape_.heads ? slot : 0)};
               });
  }

  const Call& call_;
  const Problem& problem_;
  const BiasShape& shape_;
  const std::int64_t group_;
  const BiasTiles tiles_;
};

/// The gradient of a bias with elements of several terms, if wanted.
template <core::Kernel K>
void sum_bias_gradient(const Call& call) {
  if (!call.plan.problem.bias || call.tensors.dbias.data == nullptr ||
      writes_bias_once(call.plan.problem, call.tensors)) {
    return;
  }
  const BiasGradient<K> gradient(call);
  for_each_task(call, gradient.tasks(),
                [&](std::int64_t index, int worker) { gradient.run(index, worker); });
}

}  // namespace tessera::cpu::TESSERA_ISA
