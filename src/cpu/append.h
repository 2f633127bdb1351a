// New keys and values on their way into a cache (S13), and queries beside them: rows are copied,
// and of queries and keys the first columns are rotated.
#pragma once

#include <cstring>

#include "cpu/call.h"
#include "cpu/copy.h"
#include "plan/append.h"

namespace tessera::cpu::TESSERA_ISA {

/// n elements of any type to fp32, and back.
template <class T>
TESSERA_INLINE void widen(const T* from, std::int64_t n, float* to) {
  for (std::int64_t j = 0; j < n; j += kLanes) {
    const std::int64_t count = core::min<std::int64_t>(n - j, kLanes);
    store_n(to + j, load_n(from + j, count), count);
  }
}
template <class T>
TESSERA_INLINE void narrow(const float* from, std::int64_t n, T* to) {
  for (std::int64_t j = 0; j < n; j += kLanes) {
    const std::int64_t count = core::min<std::int64_t>(n - j, kLanes);
    store_n(to + j, load_n(from + j, count), count);
  }
}

/// A position's row of the tables; R: their type.
template <class R>
struct Turn {
  const R* cos;  ///< null: rows are copied
  const R* sin;
};

/// Pairs of columns j and j + half. to may be from.
template <class T, class R>
TESSERA_INLINE void rotate_halves(const T* from, const Turn<R>& turn, std::int64_t half, T* to) {
  for (std::int64_t j = 0; j < half; j += kLanes) {
    const std::int64_t n = core::min<std::int64_t>(half - j, kLanes);
    const F32 cos = load_n(turn.cos + j, n), sin = load_n(turn.sin + j, n);
    const F32 x = load_n(from + j, n), y = load_n(from + half + j, n);
    store_n(to + j, fms(x, cos, y * sin), n);
    store_n(to + half + j, fma(x, sin, y * cos), n);
  }
}

/// Pairs of columns 2j and 2j + 1. to may be from.
template <class T, class R>
TESSERA_INLINE void rotate_neighbours(const T* from, const Turn<R>& turn, std::int64_t half,
                                      T* to) {
  constexpr std::int64_t kPairs = 64;  // at a time
  float cos[kPairs], sin[kPairs], x[2 * kPairs];
  for (std::int64_t j = 0; j < half; j += kPairs) {
    const std::int64_t n = core::min(half - j, kPairs);
    widen(turn.cos + j, n, cos);
    widen(turn.sin + j, n, sin);
    widen(from + 2 * j, 2 * n, x);
    for (std::int64_t i = 0; i < n; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = a * sin[i] + b * cos[i];
    }
    narrow(x, 2 * n, to + 2 * j);
  }
}

/// Rows of one tensor on their way: all heads of one at a time.
template <class T, class R>
struct Carrier {
  const ConstTensor& from;
  const Tensor& to;
  std::int64_t heads, dim;
  core::Divisor seqlen;  ///< of `from`; packed: 0
  std::int64_t rotary;   ///< columns that are rotated
  bool interleaved;

  /// to_row: elements from the start of `to`.
  TESSERA_INLINE void carry(std::int64_t row, const Turn<R>& turn, std::int64_t to_row) const {
    const std::int64_t from_row = core::row_offset(strides_of(from), seqlen, row);
    for (std::int64_t h = 0; h < heads; ++h) {
      const T* const x = static_cast<const T*>(from.data) + from_row + h * from.stride_head;
      T* const y = static_cast<T*>(to.data) + to_row + h * to.stride_head;
      const std::int64_t turned = turn.cos == nullptr ? 0 : rotary;
      if (turned > 0 && interleaved) rotate_neighbours(x, turn, turned / 2, y);
      if (turned > 0 && !interleaved) rotate_halves(x, turn, turned / 2, y);
      if (x != y) {
        std::memcpy(y + turned, x + turned, static_cast<std::size_t>(dim - turned) * sizeof(T));
      }
    }
  }
};

/// T, R: of the rows and of the tables.
template <class T, class R>
void append_typed(const AppendCall& call) {
  const AppendShape& s = call.shape;
  const AppendTensors& t = call.tensors;
  const core::Append places = append_of(s, t);
  const RotaryShape rotary = s.rotary.value_or(RotaryShape{});
  const core::Divisor seqlen_new(s.packed_new ? 0 : static_cast<int>(s.cache.seqlen_new));
  const core::Divisor seqlen_q(s.packed ? 0 : static_cast<int>(s.seqlen_q));
  const Carrier<T, R> k = {t.k_new,    t.k,        s.num_heads_k,     s.head_dim,
                           seqlen_new, rotary.dim, rotary.interleaved};
  const Carrier<T, R> v = {t.v_new, t.v, s.num_heads_k, s.head_dim_v, seqlen_new, 0, false};
  const Carrier<T, R> q = {t.q,      t.q_out,    s.num_heads,       s.head_dim,
                           seqlen_q, rotary.dim, rotary.interleaved};
  const auto turn_of = [&](std::int64_t position) -> Turn<R> {
    if (position < 0 || position >= rotary.positions) return {nullptr, nullptr};
    return {static_cast<const R*>(t.rotary.cos) + position * t.rotary.stride_cos,
            static_cast<const R*>(t.rotary.sin) + position * t.rotary.stride_sin};
  };
  // An item is worth a worker's while; it has rows of one kind.
  constexpr std::int64_t kItemBytes = 1 << 16;
  const auto item_of = [](std::int64_t columns) {
    return core::max<std::int64_t>(kItemBytes / (columns * static_cast<std::int64_t>(sizeof(T))),
                                   1);
  };
  const std::int64_t rows_new = s.rows_new(), rows_q = s.rows_q();
  const std::int64_t item_new = item_of(s.num_heads_k * (s.head_dim + s.head_dim_v));
  const std::int64_t item_q = item_of(core::max<std::int64_t>(s.num_heads * s.head_dim, 1));
  const std::int64_t items_new = core::ceil_div(rows_new, item_new);
  const std::int64_t items_q = core::ceil_div(rows_q, item_q);
  for_each_task(call, items_new + items_q, [&](std::int64_t index, int) {
    if (index >= items_new) {
      const std::int64_t first = (index - items_new) * item_q;
      for (std::int64_t row = first; row < core::min(first + item_q, rows_q); ++row) {
        q.carry(row, turn_of(places.position_of_query(row)),
                core::row_offset(strides_of(t.q_out), seqlen_q, row));
      }
      return;
    }
    const std::int64_t first = index * item_new;
    for (std::int64_t row = first; row < core::min(first + item_new, rows_new); ++row) {
      const core::Slot slot = places.slot_of(row);
      if (!slot.exists()) continue;
      const std::int64_t position = s.rotary ? places.position_of_new(row) : -1;
      k.carry(row, turn_of(position), slot.offset(strides_of(t.k), 0));
      v.carry(row, turn_of(-1), slot.offset(strides_of(t.v), 0));
    }
  });
}

inline void append_rows(const AppendCall& call) {
  with_storage(call.shape.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.shape.rotary && call.shape.rotary->dtype == call.shape.dtype) {
      append_typed<T, T>(call);
    } else {
      append_typed<T, float>(call);
    }
  });
}

}  // namespace tessera::cpu::TESSERA_ISA
