// Rows of any type as fp32 numbers: their rotation (S13), and their way to 8 bits (S14). Appending
// and quantising have it in common.
#pragma once

#include <type_traits>

#include "core/mask.h"
#include "core/quantize.h"
#include "cpu/simd.h"

namespace tessera::cpu::TESSERA_ISA {

/// Columns of a row that are numbers at a time.
inline constexpr int kPieceColumns = core::kMostHadamard;

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

/// Calls body(column, n) for every vector of columns.
template <class Body>
TESSERA_INLINE void for_each_vector(const core::Range& columns, const Body& body) {
  for (int c = columns.begin; c < columns.end; c += kLanes) {
    body(c, core::min(columns.end - c, kLanes));
  }
}

template <class T>
TESSERA_INLINE F32 load_part(const T* p, int n) {
  return n == kLanes ? load(p) : load_n(p, n);
}

/// Neighbours, as quantising rotates: columns of a row, no more than kPieceColumns, the first one
/// even.
template <class T, class R>
TESSERA_INLINE void rotate_pairs(const T* row, const Turn<R>& turn, const core::Range& columns,
                                 float* out) {
  float cos[kPieceColumns / 2], sin[kPieceColumns / 2];
  const int pairs = columns.size() / 2, first = columns.begin / 2;
  if (pairs <= 0) return;
  widen(turn.cos + first, pairs, cos);
  widen(turn.sin + first, pairs, sin);
  widen(row + columns.begin, 2 * pairs, out);
  for (int j = 0; j < pairs; ++j) {
    const float a = out[2 * j], b = out[2 * j + 1];
    out[2 * j] = core::rotated_x(a, b, cos[j], sin[j]);
    out[2 * j + 1] = core::rotated_y(a, b, cos[j], sin[j]);
  }
}

/// Columns of a row after quantising's rotation (core/quantize.h) of the first `rotary` ones, in
/// fp32. Up to kLanes - 1 numbers behind them may be written.
template <class T, class R>
TESSERA_INLINE void rotate_columns(const T* row, const Turn<R>& turn, int rotary, bool interleaved,
                                   const core::Range& columns, float* out) {
  out -= columns.begin;
  const int turned = turn.cos == nullptr ? 0 : rotary, half = turned / 2;
  if (turned > 0 && interleaved) {
    rotate_pairs(row, turn, core::intersect(columns, {0, turned}), out + columns.begin);
  } else if (turned > 0) {
    for_each_vector(core::intersect(columns, {0, half}), [&](int c, int n) {
      const F32 x = load_part(row + c, n), y = load_part(row + half + c, n);
      store_n(out + c,
              core::rotated_x(x, y, load_part(turn.cos + c, n), load_part(turn.sin + c, n)), n);
    });
    for_each_vector(core::intersect(columns, {half, turned}), [&](int c, int n) {
      const int j = c - half;
      const F32 x = load_part(row + j, n), y = load_part(row + c, n);
      store_n(out + c,
              core::rotated_y(x, y, load_part(turn.cos + j, n), load_part(turn.sin + j, n)), n);
    });
  }
  for_each_vector(core::intersect(columns, {turned, columns.end}),
                  [&](int c, int n) { store(out + c, load_part(row + c, n)); });
}

/// The larger magnitudes of two vectors; NaN of x does not count.
TESSERA_INLINE F32 larger_magnitudes(F32 amax, F32 x) { return max(abs(x), amax); }

/// n numbers as elements of 8 bits.
template <class Out>
TESSERA_INLINE void store_bytes(Out* to, F32 x, int n) {
  const U32 elements = narrow(Out{}, x);
  if (n == kLanes) {
    store_u8(to, elements);
  } else {
    store_u8_n(to, elements, n);
  }
}

/// The largest magnitude of such elements.
template <class Out>
inline constexpr float kLimit = core::limit_of(std::is_same_v<Out, I8> ? Dtype::i8 : Dtype::e4m3);

}  // namespace tessera::cpu::TESSERA_ISA
