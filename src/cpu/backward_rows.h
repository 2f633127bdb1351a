// kTile grouped rows of one (batch, key/value head) on their way into the backward: copies of Q and
// dO in the two layouts that the products read, and what each row needs besides, its lse and its
// delta. Called by the units' preparation, and by the pass over a broadcast bias, which keeps
// copies of its own.
#pragma once

#include "cpu/backward_tile.h"

namespace tessera::cpu::TESSERA_ISA {

template <core::Kernel K>
class BackwardRows {
  using Tile = BackwardTile<K>;
  using Word = typename Tile::Word;

 public:
  BackwardRows(const Tile& tile, std::int64_t first)
      : t_(tile), valid_(core::min<std::int64_t>(kTile, tile.map.rows.count() - first)) {
    RowMap::Row row = t_.map.at(first);
    for (int i = 0; i < kTile; ++i) {
      query_[i] = row.query;
      head_[i] = t_.map.head_of(row);
      if (i + 1 < valid_) row = t_.map.next(row);
    }
    row_ = t_.first_row + first;
    slot_row_ = t_.slot_row + first;
  }

  /// Asks for what prepare() reads of the caller's, and for where it copies it.
  void prefetch() const {
    const auto size = static_cast<std::int64_t>(size_of(t_.problem.dtype));
    const auto ask = [&](const ConstTensor& tensor, std::int64_t n, int i) {
      prefetch_row<Access::read>(row_of<const std::byte>(tensor, i, size), n * size);
    };
    for (int i = 0; i < valid_; ++i) {
      ask(t_.tensors.q, t_.problem.head_dim, i);
      ask(t_.tensors.dout, t_.problem.head_dim_v, i);
      ask(t_.tensors.saved_o, t_.problem.head_dim_v, i);
    }
    const auto ask_for_copy = [&](std::byte* rows, std::int64_t stride) {
      const std::int64_t row_bytes = stride * Tile::kElementBytes;
      prefetch_row<Access::write>(rows + slot_row_ * row_bytes, kTile * row_bytes);
    };
    ask_for_copy(t_.shared.q, t_.d);
    ask_for_copy(t_.shared.q_transposed, t_.d);
    ask_for_copy(t_.shared.dout, t_.dv);
    ask_for_copy(t_.shared.dout_transposed, t_.dv);
  }

  /// Everything that units need; rows that are in no unit get their dQ, zero, here.
  void prepare() {
    copy();
    t_.shared.turns[slot_row_ / kTile] = 0;
    with_tensor_storage<K>(t_.problem.dtype, [&](auto storage) {
      using T = decltype(storage);
      scale_rows<T>();
      if (t_.band.keys_of(core::Range{query_[0], query_[kTile - 1] + 1}).empty()) zero_dq<T>();
    });
  }

  /// Q and dO, as rows and transposed.
  void copy() {
    with_tensor_storage<K>(t_.problem.dtype, [&](auto storage) {
      using T = decltype(storage);
      copy_tensor<T>(t_.tensors.q, t_.problem.head_dim, t_.d, t_.shared.q, t_.shared.q_transposed);
      copy_tensor<T>(t_.tensors.dout, t_.problem.head_dim_v, t_.dv, t_.shared.dout,
                     t_.shared.dout_transposed);
    });
  }

 private:
  /// Row i; size: of an element, in units of T.
  template <class T, class Any>
  T* row_of(const Any& tensor, int i, std::int64_t size = 1) const {
    using Data = std::conditional_t<std::is_const_v<T>, const void, void>;
    return static_cast<T*>(static_cast<Data*>(tensor.data)) +
           t_.map.offset(tensor, query_[i], head_[i]) * size;
  }

  template <class T>
  [[gnu::noinline]] void copy_tensor(const ConstTensor& tensor, std::int64_t n, std::int64_t stride,
                                     std::byte* rows, std::byte* transposed) const {
    const T* row[kTile];
    for (int i = 0; i < kTile; ++i) row[i] = row_of<const T>(tensor, i);
    Word* natural = reinterpret_cast<Word*>(rows) + slot_row_ / Tile::kStep * stride;
    Word* lanes = reinterpret_cast<Word*>(transposed) + slot_row_ / Tile::kStep * stride;
    if constexpr (Tile::kPairs) {
      for (int i = 0; i < kTile; i += 2) {
        Word* out = natural + i / 2 * stride;
        std::int64_t j = 0;
        for (; j + kLanes <= n; j += kLanes) store(out + j, load_pairs(row[i] + j, row[i + 1] + j));
        if (j < n) store(out + j, load_pairs_n(row[i] + j, row[i + 1] + j, n - j));
      }
      rows_to_lane_pairs(row, n, lanes);
    } else {
      for (int i = 0; i < kTile; ++i) {
        float* out = natural + i * stride;
        std::int64_t j = 0;
        for (; j + kLanes <= n; j += kLanes) store(out + j, load(row[i] + j));
        if (j < n) store(out + j, load_n(row[i] + j, n - j));
      }
      rows_to_lanes(row, n, 1.0F, lanes);
    }
  }

  /// shift and delta; rows past the last get values that make P and dS exactly 0.
  template <class T>
  [[gnu::noinline]] void scale_rows() const {
    const std::int64_t n = t_.problem.head_dim_v;
    float lse[kTile], delta[kTile];
    for (int i = 0; i < kTile; ++i) {
      lse[i] = -core::kInfinity;
      delta[i] = 0.0F;
      if (i >= valid_) continue;
      const T* o = row_of<const T>(t_.tensors.saved_o, i);
      const T* dout = row_of<const T>(t_.tensors.dout, i);
      F32 sum{};
      std::int64_t j = 0;
      for (; j + kLanes <= n; j += kLanes) sum = fma(load(o + j), load(dout + j), sum);
      if (j < n) sum = fma(load_n(o + j, n - j), load_n(dout + j, n - j), sum);
      const std::int64_t at = t_.map.lse_index(query_[i], head_[i]);
      lse[i] = t_.tensors.saved_softmax_lse[at];
      delta[i] = reduce_add(sum);
      if (t_.tensors.dsoftmax_lse != nullptr) delta[i] -= t_.tensors.dsoftmax_lse[at];
    }
    for (int i = 0; i < kTile; i += kLanes) {
      store(t_.shared.shift + row_ + i, core::backward_shift(load(lse + i)));
      store(t_.shared.delta + row_ + i, load(delta + i));
    }
  }

  template <class T>
  void zero_dq() const {
    for (int i = 0; i < valid_; ++i) {
      T* dq = row_of<T>(t_.tensors.dq, i);
      for (std::int64_t j = 0; j < t_.problem.head_dim; ++j) dq[j] = T{};
    }
  }

  const Tile& t_;
  const std::int64_t valid_;
  std::int64_t row_ = 0;       ///< in shift and delta
  std::int64_t slot_row_ = 0;  ///< in the other shared arrays
  int query_[kTile];
  int head_[kTile];
};

}  // namespace tessera::cpu::TESSERA_ISA
