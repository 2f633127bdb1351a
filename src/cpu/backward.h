// The backward pass. A unit of work is one block of block_n keys of one (batch, key/value head): it
// owns those keys' dK and dV and walks over all tiles of grouped rows that see them, so the
// sum over a group's heads (S10) is part of the walk. Every tile costs five products (Dao 2023,
// algorithm 2):
//   S^T = K Q^T    dV += P^T dO    dP^T = V dO^T    dK += dS^T Q    dQ += dS K
//
// dQ is summed in fp32 over the key blocks by their units in turn: a unit adds its part of a tile
// once the unit of the key block before has added its own, so the sum is the same for any number of
// threads, and no partial sums are kept. Units that may wait for another come later in the order of
// tasks, and neighbours in that order belong to different heads, or run one tile behind each other.
//
// For every head: prepare (rows copied once, delta), then units. At the end, the gradients of the
// sink and of a broadcast bias.
#pragma once

#include <array>

#include "cpu/backward_bias.h"
#include "cpu/backward_rows.h"
#include "cpu/backward_tile.h"
#include "cpu/turns.h"

namespace tessera::cpu::TESSERA_ISA {

// ---- units ----

template <core::Kernel K>
class BackwardUnit {
  using Tile = BackwardTile<K>;
  using Word = typename Tile::Word;
  using Element = typename Tile::Element;
  static constexpr int kM = Tile::kM;
  static constexpr int kN = Tile::kN;

 public:
  BackwardUnit(const Call& call, int batch, int head_k, int block, int worker, std::int64_t slot)
      : t_(call, batch, head_k, worker, slot), number_(block), scale_(call.plan.score.scale) {}

  void run() {
    const int first = number_ * kN;
    const bool fused_bias = writes_bias_once(t_.problem, t_.tensors);
    if (first < t_.map.sequence.seqlen_k) {
      t_.load_block(first);
      for (std::int64_t i = 0; i < kN * t_.d; i += kLanes) store(t_.scratch.dk + i, F32{});
      for (std::int64_t i = 0; i < kN * t_.dv; i += kLanes) store(t_.scratch.dv + i, F32{});
      const core::Range queries = t_.band.queries_of(t_.block);
      const std::int64_t group = t_.map.rows.group;
      const std::int64_t end = queries.end * group;
      std::int64_t row = queries.begin * group / kM * kM;
      if (fused_bias) write_zero_bias(t_, first, 0, row);
      for (; row < end; row += kM) {
        const bool seen = t_.place(row);
        t_.last = row + kM >= end;
        if (seen) add_tile(fused_bias);
        if (fused_bias) write_bias(t_, first, row, seen);
      }
      if (fused_bias) write_zero_bias(t_, first, row, max_rows());
      with_tensor_storage<K>(t_.problem.dtype, [&](auto storage) {
        using T = decltype(storage);
        write_keys<T>(t_.tensors.dk, t_.scratch.dk, t_.problem.head_dim, t_.d, scale_);
        write_keys<T>(t_.tensors.dv, t_.scratch.dv, t_.problem.head_dim_v, t_.dv, 1.0F);
      });
    } else if (fused_bias) {
      write_zero_bias(t_, first, 0, max_rows());
    }
  }

 private:
  std::int64_t max_rows() const { return t_.problem.seqlen_q * t_.map.rows.group; }

  void add_tile(bool keep_dbias) {
    t_.scores();
    add_dv();
    t_.gradients(keep_dbias);
    add_dk();
    add_dq();
  }

  /// C[m][:] += A(m, :) B for kRowBlock rows of C, `dim` columns; ask(first column) comes before
  /// every kTile of them.
  template <class A, class Store, class Ask>
  TESSERA_INLINE static void columns(const A& a, std::int64_t k, const Word* b, std::int64_t dim,
                                     const Store& put, const Ask& ask) {
    std::int64_t column = 0;
    const auto finish = [&](std::int64_t m, auto& c) TESSERA_LAMBDA_INLINE {
      for (int n = 0; n < static_cast<int>(std::size(c)); ++n) put(m, column + n * kLanes, c[n]);
    };
    for (; column + kTile <= dim; column += kTile) {
      ask(column);
      product_block<kRowBlock, kNV>(0, k, a, b + column, dim, finish);
    }
    for (; column < dim; column += kLanes) {
      ask(column);
      product_block<kRowBlock, 1>(0, k, a, b + column, dim, finish);
    }
  }

  /// out[key][dim] += A[key][rows] B[rows][dim], A = P or dS: every strip of keys over the rows it
  /// sees. `result` is where out goes in the end.
  TESSERA_INLINE void add_keys(const Element* a, const std::byte* rows_of_b, std::int64_t dim,
                               float* out, const Tensor& result, std::int64_t head_dim) const {
    const Word* b = reinterpret_cast<const Word*>(rows_of_b);
    for (int key = t_.strips.begin; key < t_.strips.end; key += kRowBlock) {
      core::Range rows = {0, t_.valid};
      if (t_.masked) rows = t_.rows_of({key, key + kRowBlock});
      if (rows.empty()) continue;
      rows.begin -= rows.begin % Tile::kStep;
      rows.end = core::round_up(rows.end, Tile::kStep);
      float* c = out + key * dim;
      columns(
          Rows<Element>{a + key * kM + rows.begin, kM}, rows.size(),
          b + t_.words_before(rows.begin, dim), dim,
          [&](std::int64_t m, std::int64_t column, F32 x) TESSERA_LAMBDA_INLINE {
            float* p = c + m * dim + column;
            store(p, load(p) + x);
          },
          [&](std::int64_t column) TESSERA_LAMBDA_INLINE {
            const auto piece = Tile::piece_of(key, part_of(column), parts_of(dim));
            if (t_.last) {
              t_.template prefetch_keys<Access::write>(result, head_dim, t_.block.begin, piece);
            } else {
              t_.prefetch_next(b, dim * Tile::kElementBytes, piece);
            }
          });
    }
  }

  /// Columns are multiplied kTile at a time.
  static int part_of(std::int64_t column) { return static_cast<int>(column / kTile); }
  static int parts_of(std::int64_t dim) {
    return static_cast<int>(core::ceil_div<std::int64_t>(dim, kTile));
  }

  [[gnu::noinline]] void add_dv() const {
    add_keys(t_.weights(), t_.shared.dout, t_.dv, t_.scratch.dv, t_.tensors.dv,
             t_.problem.head_dim_v);
  }
  [[gnu::noinline]] void add_dk() const {
    add_keys(t_.dscores(), t_.shared.q, t_.d, t_.scratch.dk, t_.tensors.dk, t_.problem.head_dim);
  }

  /// Key blocks that see the tile: neighbours.
  core::Range blocks_of_tile() const {
    const core::Range keys = t_.band.keys_of(t_.queries_of(0, t_.valid));
    return {keys.begin / kN, (keys.end - 1) / kN + 1};
  }

  [[gnu::noinline]] void add_dq() const {
    const auto [first, end] = blocks_of_tile();
    std::int32_t* turn = t_.shared.turns + (t_.slot_row + t_.row) / kTile;
    float* out = t_.shared.dq + (t_.slot_row + t_.row) * t_.d;
    const bool fresh = number_ == first;
    if (!fresh) wait_for_turn(turn, number_ - first);
    // Columns outside: theirs of K fit the first cache, all of K would not.
    std::int64_t column = 0;
    const bool last = number_ + 1 == end;
    for (; column + kTile <= t_.d; column += kTile) add_dq_columns<kNV>(column, out, fresh, last);
    for (; column < t_.d; column += kLanes) add_dq_columns<1>(column, out, fresh, last);
    if (last) {
      with_tensor_storage<K>(t_.problem.dtype,
                             [&](auto storage) { write_dq<decltype(storage)>(out); });
    } else {
      pass_turn(turn, number_ - first + 1);
    }
  }

  template <int NV>
  TESSERA_INLINE void add_dq_columns(std::int64_t column, float* out, bool fresh, bool last) const {
    for (int r = 0; r < t_.valid; r += kRowBlock) {
      const int parts = parts_of(t_.d), part = part_of(column);
      t_.prefetch_next(t_.shared.dq, t_.d * 4,
                       {part * (kM / kRowBlock) + r / kRowBlock, parts * (kM / kRowBlock)});
      if (last) {
        prefetch_dq({r + kRowBlock * part / parts, r + kRowBlock * (part + 1) / parts});
      }
      core::Range seen = {t_.strips.begin, core::min(t_.strips.end, t_.block.size())};
      if (t_.masked) seen = t_.keys_of(r, r + kRowBlock);
      if (seen.empty() && !fresh) continue;
      seen.begin -= seen.begin % Tile::kStep;
      seen.end = core::round_up(seen.end, Tile::kStep);
      float* c = out + r * t_.d + column;
      const auto add = [&](std::int64_t m, F32(&x)[NV]) TESSERA_LAMBDA_INLINE {
        if (kTile % kRowBlock != 0 && r + m >= t_.rows) return;
        for (int n = 0; n < NV; ++n) {
          float* p = c + m * t_.d + n * kLanes;
          store(p, fresh ? x[n] : load(p) + x[n]);
        }
      };
      product_block<kRowBlock, NV>(
          0, seen.size(), Columns<Word>{t_.dscore_words() + seen.begin / Tile::kStep * kM + r, kM},
          t_.key_words() + seen.begin / Tile::kStep * t_.d + column, t_.d, add);
    }
  }

  /// Asks for where write_dq will write these rows of the tile.
  void prefetch_dq(core::Range rows) const {
    const auto size = static_cast<std::int64_t>(size_of(t_.problem.dtype));
    const Tensor& dq = t_.tensors.dq;
    for (int r = rows.begin; r < core::min(rows.end, t_.valid); ++r) {
      const RowMap::Row row = t_.map.at(t_.row + r);
      prefetch_row<Access::write>(static_cast<const std::byte*>(dq.data) +
                                      t_.map.offset(dq, row.query, t_.map.head_of(row)) * size,
                                  t_.problem.head_dim * size);
    }
  }

  template <class T>
  TESSERA_INLINE static void write_row(T* out, const float* in, std::int64_t n, F32 scale) {
    std::int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store(out + j, load(in + j) * scale);
    if (j < n) store_n(out + j, load(in + j) * scale, n - j);
  }

  template <class T>
  void write_dq(const float* in) const {
    const Tensor& dq = t_.tensors.dq;
    RowMap::Row row = t_.map.at(t_.row);
    for (int r = 0; r < t_.valid; ++r, row = t_.map.next(row)) {
      T* out = static_cast<T*>(dq.data) + t_.map.offset(dq, row.query, t_.map.head_of(row));
      write_row(out, in + r * t_.d, t_.problem.head_dim, F32(scale_));
    }
  }

  template <class T>
  void write_keys(const Tensor& tensor, const float* in, std::int64_t n, std::int64_t stride,
                  float scale) const {
    T* out = static_cast<T*>(tensor.data) + t_.map.key_offset(tensor) +
             t_.block.begin * tensor.stride_seqlen;
    for (int key = 0; key < t_.block.size(); ++key) {
      write_row(out + key * tensor.stride_seqlen, in + key * stride, n, F32(scale));
    }
  }

  Tile t_;
  const int number_;   ///< of the key block
  const float scale_;  ///< what core::score_gradient leaves to dQ and dK
};

/// dSink of one head: -sum over its rows of p_sink * delta, in a fixed order.
template <core::Kernel K>
void backward_sink(const Call& call, int head) {
  const int group = static_cast<int>(call.plan.problem.group());
  const F32 sink(call.tensors.sink[head] * core::kLog2e);
  F32 sum{};
  for (int b = 0; b < call.plan.problem.batch; ++b) {
    const BackwardTile<K> tile(call, b, head / group, 0, 0);
    const std::int64_t first = tile.first_row + head % group;
    for (int query = 0; query < tile.map.sequence.seqlen_q; query += kLanes) {
      const int count = core::min(kLanes, tile.map.sequence.seqlen_q - query);
      float shift[kLanes], delta[kLanes] = {};
      for (int i = 0; i < kLanes; ++i) shift[i] = core::kInfinity;
      for (int i = 0; i < count; ++i) {
        const std::int64_t row = first + (std::int64_t{query} + i) * group;
        shift[i] = tile.shared.shift[row];
        delta[i] = tile.shared.delta[row];
      }
      sum -= exp2(sink - load(shift)) * load(delta);
    }
  }
  call.tensors.dsink[head] = reduce_add(sum);
}

/// The whole pass.
template <core::Kernel K>
void backward(const Call& call) {
  const Problem& p = call.plan.problem;
  const Call quiet{call.plan, call.tensors, call.layout, call.executor, nullptr, nullptr};
  const std::int64_t workers =
      core::min<std::int64_t>(call.executor.num_threads, call.plan.device.threads);
  const core::BackwardOrder order = backward_order(p, K, workers);
  const std::int64_t tiles = order.tiles, blocks = order.blocks, wave = order.wave;
  std::int32_t* prepared = call.layout.backward.prepared;
  std::int32_t* finished = call.layout.backward.finished;
  for (std::int64_t head = 0; head < order.heads; ++head) prepared[head] = finished[head] = 0;

  // A wave uses other slots than the one before it, and the same as the one before that.
  for_each_task(call, order.count(), [&](std::int64_t index, int worker) {
    const auto [head, number] = order.at(index);
    const std::int64_t slot = head % (2 * wave);
    const auto batch = static_cast<int>(head / p.num_heads_k);
    const auto head_k = static_cast<int>(head % p.num_heads_k);
    if (number < tiles) {
      if (head != slot)
        wait_for_turn(finished + head - 2 * wave, static_cast<std::int32_t>(blocks));
      const BackwardTile<K> tile(call, batch, head_k, worker, slot);
      const std::int64_t begin = number * K.block_m;
      const std::int64_t end = core::min<std::int64_t>(begin + K.block_m, tile.map.rows.count());
      for (std::int64_t row = begin; row < end; row += kTile) {
        BackwardRows<K> rows(tile, row);
        if (row == begin) rows.prefetch();
        if (row + kTile < end) BackwardRows<K>(tile, row + kTile).prefetch();
        rows.prepare();
      }
      __atomic_fetch_add(prepared + head, 1, __ATOMIC_RELEASE);
    } else {
      wait_for_turn(prepared + head, static_cast<std::int32_t>(tiles));
      BackwardUnit<K>(call, batch, head_k, static_cast<int>(number - tiles), worker, slot).run();
      __atomic_fetch_add(finished + head, 1, __ATOMIC_RELEASE);
    }
  });

  if (p.sink && call.tensors.dsink != nullptr) {
    for_each_task(quiet, p.num_heads,
                  [&](std::int64_t head, int) { backward_sink<K>(call, static_cast<int>(head)); });
  }
  sum_bias_gradient<K>(quiet);
}

}  // namespace tessera::cpu::TESSERA_ISA
