// New keys and values on their way into a cache (S13), and queries beside them: rows are copied,
// and of queries and keys the first columns are rotated. Into a cache of 8 bits they go by way of
// fp32, scaled as quantising does it (S14).
#pragma once

#include <cstring>

#include "cpu/call.h"
#include "cpu/copy.h"
#include "cpu/numbers.h"
#include "plan/append.h"

namespace tessera::cpu::TESSERA_ISA {

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

/// New rows of one tensor on their way to 8 bits. T, R, Out: of rows, tables and elements.
template <class T, class R, class Out>
class QuantizingCarrier {
 public:
  TESSERA_INLINE QuantizingCarrier(const core::Append& places, const ConstTensor& from,
                                   const Tensor& to, const tessera::Scales& numbers,
                                   const core::Scales& scales, int heads, int dim,
                                   const core::Divisor& seqlen, const RotaryShape& rotary)
      : places_(places),
        from_(from),
        to_(to),
        numbers_(numbers),
        scales_(scales),
        heads_(heads),
        dim_(dim),
        seqlen_(seqlen),
        rotary_(static_cast<int>(rotary.dim)),
        interleaved_(rotary.interleaved) {}

  [[gnu::noinline]] void carry(std::int64_t row, const Turn<R>& turn,
                               const core::Slot& slot) const {
    const T* const first =
        static_cast<const T*>(from_.data) + core::row_offset(strides_of(from_), seqlen_, row);
    const bool written = scales_.of_slots(), kept = dim_ <= kKeptColumns;
    const std::int64_t first_scale = places_.scale_offset(scales_, row, slot, 0);
    alignas(64) float numbers[kKeptColumns + kLanes];
    for (int h = 0; h < heads_; ++h) {
      const T* const x = first + h * from_.stride_head;
      Out* const y = static_cast<Out*>(to_.data) + slot.offset(strides_of(to_), h);
      const std::int64_t at = first_scale + h * scales_.stride_head;
      float factor = 1.0F;
      if (!written) {
        factor /= scales_.data[at];
      } else {
        F32 amax{0.0F};
        for_each_piece([&](const core::Range& columns) {
          float* const made = numbers + (kept ? columns.begin : 0);
          make(x, turn, columns, made);
          for_each_vector({0, columns.size()}, [&](int c, int n) {
            amax = larger_magnitudes(amax, load_part(made + c, n));
          });
        });
        const auto of_row = core::WrittenScale<float>::of(reduce_max(amax), kLimit<Out>);
        numbers_.data[at] = of_row.scale;
        factor = of_row.factor;
      }
      for_each_piece([&](const core::Range& columns) {
        float* const made = numbers + (kept ? columns.begin : 0);
        if (!written || !kept) make(x, turn, columns, made);
        for_each_vector({0, columns.size()}, [&](int c, int n) {
          store_bytes(y + columns.begin + c, load_part(made + c, n) * F32(factor), n);
        });
      });
    }
  }

 private:
  /// Of a row whose scale is written, until that is known; longer rows are made twice.
  static constexpr int kKeptColumns = 8 * kPieceColumns;

  template <class Body>
  TESSERA_INLINE void for_each_piece(const Body& body) const {
    for (int c = 0; c < dim_; c += kPieceColumns) {
      body(core::Range{c, core::min(c + kPieceColumns, dim_)});
    }
  }
  [[gnu::noinline]] void make(const T* row, const Turn<R>& turn, const core::Range& columns,
                              float* made) const {
    rotate_columns(row, turn, rotary_, interleaved_, columns, made);
  }

  const core::Append& places_;
  const ConstTensor& from_;
  const Tensor& to_;
  const tessera::Scales& numbers_;  ///< where the scales lie
  const core::Scales scales_;       ///< and which
  int heads_, dim_;
  core::Divisor seqlen_;  ///< of `from`; packed: 0
  int rotary_;            ///< columns that are rotated
  bool interleaved_;
};

/// Queries, and new rows by carry_new(row, turn, slot). T, R: of the rows and of the tables.
template <class T, class R, class CarryNew>
TESSERA_INLINE void append_by(const AppendCall& call, const core::Append& places,
                              const CarryNew& carry_new) {
  const AppendShape& s = call.shape;
  const AppendTensors& t = call.tensors;
  const RotaryShape rotary = s.rotary.value_or(RotaryShape{});
  const core::Divisor seqlen_q(s.packed ? 0 : static_cast<int>(s.seqlen_q));
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
      carry_new(row, turn_of(s.rotary ? places.position_of_new(row) : -1), slot);
    }
  });
}

/// Out: of the elements of a cache of 8 bits.
template <class T, class R, class Out>
void append_quantizing(const AppendCall& call, const core::Append& places,
                       const core::Divisor& seqlen_new) {
  const AppendShape& s = call.shape;
  const AppendTensors& t = call.tensors;
  const int heads = static_cast<int>(s.num_heads_k);
  const QuantizingCarrier<T, R, Out> k(places, t.k_new, t.k, t.k_scale, k_scales_of(s, t), heads,
                                       static_cast<int>(s.head_dim), seqlen_new,
                                       s.rotary.value_or(RotaryShape{}));
  const QuantizingCarrier<T, R, Out> v(places, t.v_new, t.v, t.v_scale, v_scales_of(s, t), heads,
                                       static_cast<int>(s.head_dim_v), seqlen_new, RotaryShape{});
  append_by<T, R>(call, places, [&](std::int64_t row, const Turn<R>& turn, const core::Slot& slot) {
    k.carry(row, turn, slot);
    v.carry(row, Turn<R>{nullptr, nullptr}, slot);
  });
}

template <class T, class R>
void append_typed(const AppendCall& call) {
  const AppendShape& s = call.shape;
  const AppendTensors& t = call.tensors;
  const core::Append places = append_of(s, t);
  const core::Divisor seqlen_new(s.packed_new ? 0 : static_cast<int>(s.cache.seqlen_new));
  if (s.stored_kv() == Dtype::e4m3) return append_quantizing<T, R, E4m3>(call, places, seqlen_new);
  if (s.stored_kv() == Dtype::i8) return append_quantizing<T, R, I8>(call, places, seqlen_new);
  const RotaryShape rotary = s.rotary.value_or(RotaryShape{});
  const Carrier<T, R> k = {t.k_new,    t.k,        s.num_heads_k,     s.head_dim,
                           seqlen_new, rotary.dim, rotary.interleaved};
  const Carrier<T, R> v = {t.v_new, t.v, s.num_heads_k, s.head_dim_v, seqlen_new, 0, false};
  append_by<T, R>(call, places, [&](std::int64_t row, const Turn<R>& turn, const core::Slot& slot) {
    k.carry(row, turn, slot.offset(strides_of(t.k), 0));
    v.carry(row, Turn<R>{nullptr, nullptr}, slot.offset(strides_of(t.v), 0));
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
