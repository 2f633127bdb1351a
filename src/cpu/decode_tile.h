// Pieces of the decode kernel that need to know nothing of its item: tiles of query rows and keys,
// vectors of operands.
#pragma once

#include <type_traits>

#include "cpu/decode_requests.h"
#include "cpu/product.h"

namespace tessera::cpu::TESSERA_ISA {

/// Query rows that share a load of K or V, at most.
inline constexpr int kRowTile = core::min(4, kLanes / 2);
/// Keys whose products with `rows` of queries make one reduction of kLanes sums, some of them 0
/// where there are three.
constexpr int keys_of_tile(int rows) { return kLanes / (rows > 2 ? 4 : rows); }
/// Of these so many are multiplied between requests.
constexpr int keys_at_once(int rows) { return core::min(4, keys_of_tile(rows)); }
/// Vectors of an output row that are accumulated for `rows` of them.
constexpr int columns_of_tile(int rows) { return core::min(4, kLanes / rows); }
/// Cache lines asked for by a step of the softmax.
inline constexpr int kWeighLines = 2;

// What the multiply-adds take, from rows of T: vectors of fp32, or of pairs of bf16. Head dims past
// a row's end are zero.
template <class T>
TESSERA_INLINE F32 load_operand(F32, const T* p) {
  return load(p);
}
template <class T>
TESSERA_INLINE F32 load_operand_n(F32, const T* p, std::int64_t n) {
  return load_n(p, n);
}

/// sums[r][j] += part of q row r . the same part of key row j, for a few keys from `first` on.
template <int NR, class LoadKey, class LoadQuery>
TESSERA_INLINE void multiply_key_step(F32 (&sums)[kLanes], int first, const LoadKey& load_key,
                                      const LoadQuery& load_query) {
  constexpr int kKeys = keys_of_tile(NR), kAtOnce = keys_at_once(NR);
  decltype(load_key(0)) keys[kAtOnce];
#pragma GCC unroll 4
  for (int j = 0; j < kAtOnce; ++j) keys[j] = load_key(first + j);
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r) {
    const auto q = load_query(r);
#pragma GCC unroll 4
    for (int j = 0; j < kAtOnce; ++j) {
      F32& sum = sums[r * kKeys + first + j];
      sum = multiply_add(keys[j], q, sum);
    }
  }
}

/// The same of a step of bytes, which are widened key by key.
template <int NR, class T, class LoadKey, class LoadQuery>
TESSERA_INLINE void multiply_key_step(F32 (&sums)[kLanes], const WidenBytes<T>& widen, int first,
                                      const LoadKey& load_key, const LoadQuery& load_query) {
  constexpr int kKeys = keys_of_tile(NR), kAtOnce = keys_at_once(NR);
#pragma GCC unroll 4
  for (int j = 0; j < kAtOnce; ++j) {
    U32 parts[2];
    widen(load_key(first + j), parts[0], parts[1]);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r) {
        F32& sum = sums[r * kKeys + first + j];
        sum = multiply_add(parts[part], load_query(r, part), sum);
      }
    }
  }
}

/// sums += products of NR queries, `stride` apart, of n columns, with rows that the cache has as
/// Stored. Queries that meet bytes have order_query's order.
template <int NR, class Stored, class Operand, class T, class Query>
TESSERA_INLINE void add_products(F32 (&sums)[kLanes], const T* const* rows, std::int64_t n,
                                 const Query* q, std::int64_t stride, Requests::Here& requests) {
  constexpr int kKeys = keys_of_tile(NR), kAtOnce = keys_at_once(NR);
  constexpr bool kBytes = kBytesOfPairs<T, Operand>;
  constexpr int kVectors = kAtOnce * (kBytes ? 2 : 1);  // of operands
  constexpr int kLines = lines_of<Stored, Operand>(kVectors);
  constexpr int kSteps = steps_of_line<Stored, Operand>(kVectors);
  constexpr int kStep = kStepColumns<T, Operand>;
  const T* row[kKeys];
#pragma GCC unroll 16
  for (int j = 0; j < kKeys; ++j) row[j] = rows[j];
  std::int64_t i = 0;
  const auto step_of = [&](int first, const auto& load_key) {
    if constexpr (kBytes) {
      const auto load_query = [&](int r, int part) {
        return load_operand(Operand{}, q + r * stride + i + part * (kStep / 2));
      };
      multiply_key_step<NR>(sums, WidenBytes<T>(), first, load_key, load_query);
    } else {
      const auto load_query = [&](int r) { return load_operand(Operand{}, q + r * stride + i); };
      multiply_key_step<NR>(sums, first, load_key, load_query);
    }
  };
  const auto load_key = [&](int j) { return load_operand(Operand{}, row[j] + i); };
#pragma GCC unroll 1
  while (i + kSteps * kStep <= n) {
    // With a whole tile of rows the softmax has steps enough to ask for the rest.
    const bool asks = NR < kRowTile || i > 0;
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step, i += kStep) {
#pragma GCC unroll 4
      for (int first = 0; first < kKeys; first += kAtOnce) {
        if (step == 0 && asks) requests.advance<kLines>();
        step_of(first, load_key);
      }
    }
  }
  if constexpr (kSteps > 1) {
    for (; i + kStep <= n; i += kStep) {
#pragma GCC unroll 4
      for (int first = 0; first < kKeys; first += kAtOnce) step_of(first, load_key);
    }
  }
  if (i < n) {
    const auto load_last = [&](int j) { return load_operand_n(Operand{}, row[j] + i, n - i); };
#pragma GCC unroll 4
    for (int first = 0; first < kKeys; first += kAtOnce) {
      requests.advance<kLines>();
      step_of(first, load_last);
    }
  }
}

/// Lanes used when `left` elements are left, if any.
TESSERA_INLINE std::int64_t lanes_of(std::int64_t left) {
  return core::max<std::int64_t>(0, core::min<std::int64_t>(left, kLanes));
}

/// Calls body(std::integral_constant<int, n>) for 1 <= n <= kRowTile.
template <int NR = kRowTile, class Body>
TESSERA_INLINE void with_rows(int n, const Body& body) {
  if constexpr (NR > 1) {
    if (n < NR) return with_rows<NR - 1>(n, body);
  }
  body(std::integral_constant<int, NR>{});
}

/// Calls body(number of rows, first row) for the tiles of some rows.
template <class Body>
TESSERA_INLINE void for_each_tile(int first, int last, const Body& body) {
  for (int r = first; r < last; r += kRowTile) {
    with_rows(last - r, [&](auto rows) { body(rows, r); });
  }
}

/// Lane r * kKeys + j is the score of row r and key j. out: rows of them, kStride apart.
template <int NR, int kStride>
TESSERA_INLINE void store_scores(F32 tile, float* out) {
  constexpr int kKeys = keys_of_tile(NR);
  float lanes[kLanes];
  store(lanes, tile);
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r) {
    __builtin_memcpy(out + r * kStride, lanes + r * kKeys, kKeys * sizeof(float));
  }
}

/// Which of kLanes keys a word of the tree shows, where bit 0 is `number` keys back.
[[gnu::noinline]] inline Mask in_tree(std::uint64_t word, int number) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int bit = number + i;
    lanes[i] = bit < 0 || (bit < 64 && (word >> bit & 1) != 0) ? 1.0F : 0.0F;
  }
  return load(lanes) > F32{};
}

/// Vectors of values. Pairs: of this key's row and the next one's, or zeros where there is none.
template <class Operand, int NC, class T, class Load>
TESSERA_INLINE void load_values(const T* row, [[maybe_unused]] const T* next_row,
                                const Load& load_value, Operand (&value)[NC]) {
  if constexpr (kBytesOfPairs<T, Operand>) {
    WidenBytes<T>().pair(load_value(row), next_row != nullptr ? load_value(next_row) : U32{},
                         value);
  } else if constexpr (std::is_same_v<Operand, U32>) {
#pragma GCC unroll 4
    for (int c = 0; c < NC; c += 2) {
      // A vector of pairs holds 2 * kLanes head dims: c counts vectors of sums.
      const U32 next = next_row != nullptr ? load_value(next_row + c * kLanes) : U32{};
      U32 pairs[2];
      pair_rows_of_values(load_value(row + c * kLanes), next, pairs);
      value[c] = pairs[0];
      value[c + 1] = pairs[1];
    }
  } else {
#pragma GCC unroll 8
    for (int c = 0; c < NC; ++c) value[c] = load_value(row + c * kLanes);
  }
}

}  // namespace tessera::cpu::TESSERA_ISA
