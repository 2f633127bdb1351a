// Pieces of the decode kernel that need to know nothing of its item: tiles of query rows and keys,
// vectors of operands.
#pragma once

#include <type_traits>

#include "cpu/decode_requests.h"
#include "cpu/product.h"

namespace tessera::cpu::TESSERA_ISA {

/// Query rows that share a load of K or V, at most.
inline constexpr int kRowTile = core::min(4, kLanes / 2);
/// Keys multiplied at a time, or vectors of an output row accumulated, for `rows` of them: kLanes
/// sums at most, which registers hold and which make one reduction.
constexpr int width_of_tile(int rows) { return core::min(4, kLanes / rows); }
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

/// sums[r][j] += part of q row r . the same part of key row j.
template <int NR, class LoadKey, class LoadQuery>
TESSERA_INLINE void multiply_key_step(F32 (&sums)[kLanes], const LoadKey& load_key,
                                      const LoadQuery& load_query) {
  constexpr int kKeys = width_of_tile(NR);
  decltype(load_key(0)) keys[kKeys];
#pragma GCC unroll 4
  for (int j = 0; j < kKeys; ++j) keys[j] = load_key(j);
#pragma GCC unroll 4
  for (int r = 0; r < NR; ++r) {
    const auto q = load_query(r);
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) {
      sums[r * kKeys + j] = multiply_add(keys[j], q, sums[r * kKeys + j]);
    }
  }
}

/// sums += products of NR queries, `stride` apart, of n columns, with rows that the cache has as
/// Stored.
template <int NR, class Stored, class Operand, class T, class Query>
TESSERA_INLINE void add_products(F32 (&sums)[kLanes], const T* const* rows, std::int64_t n,
                                 const Query* q, std::int64_t stride, Requests::Here& requests) {
  constexpr int kKeys = width_of_tile(NR), kLines = lines_of<Stored, Operand>(kKeys);
  constexpr int kSteps = steps_of_line<Stored, Operand>(kKeys);
  constexpr int kStep = std::is_same_v<Operand, U32> ? 2 * kLanes : kLanes;  // of a multiply-add
  const T* row[kKeys];
#pragma GCC unroll 4
  for (int j = 0; j < kKeys; ++j) row[j] = rows[j];
  std::int64_t i = 0;
  const auto load_query = [&](int r) { return load_operand(Operand{}, q + r * stride + i); };
  const auto load_key = [&](int j) { return load_operand(Operand{}, row[j] + i); };
#pragma GCC unroll 1
  while (i + kSteps * kStep <= n) {
    if (i > 0) requests.advance<kLines>();  // the rest is left to the softmax
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step, i += kStep) {
      multiply_key_step<NR>(sums, load_key, load_query);
    }
  }
  if constexpr (kSteps > 1) {
    for (; i + kStep <= n; i += kStep) multiply_key_step<NR>(sums, load_key, load_query);
  }
  if (i < n) {
    requests.advance<kLines>();
    multiply_key_step<NR>(
        sums, [&](int j) { return load_operand_n(Operand{}, row[j] + i, n - i); }, load_query);
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
  if constexpr (std::is_same_v<Operand, U32>) {
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
