// The arithmetic of quantising, bit by bit (S14), and which rows are a piece of its work. Templates
// over V take float, a vector of it, or what a GPU has that flushes nothing and fuses nothing: they
// need operators, and fused(a, b, c), which is a * b + c rounded once. No step leaves a compiler
// anything to fuse.
#pragma once

#include "core/divisor.h"
#include "core/sequences.h"

namespace tessera::core {

/// The largest element of a type of 8 bits that is written; i8 has no -128.
TESSERA_HD constexpr float limit_of(Dtype dtype) { return dtype == Dtype::i8 ? 127.0F : 448.0F; }

/// Columns x and y of a pair after their rotation.
/// @{
template <class V>
TESSERA_HD constexpr V rotated_x(V x, V y, V cos, V sin) {
  return fused(x, cos, -(y * sin));
}
template <class V>
TESSERA_HD constexpr V rotated_y(V x, V y, V cos, V sin) {
  return fused(x, sin, y * cos);
}
/// @}

/// Columns of the longest block of a Hadamard transform.
inline constexpr int kMostHadamard = 256;

/// 1 / sqrt(n), rounded, of a power of two up to kMostHadamard: what the sums of a Hadamard
/// transform are multiplied by.
TESSERA_HD constexpr float hadamard_factor(int n) {
  float factor = 1.0F;
  for (; n >= 4; n /= 4) factor *= 0.5F;
  return n == 2 ? factor * 0x1.6a09e6p-1F : factor;
}

/// A scale that takes the numbers whose largest magnitude is `amax` to the largest element, and
/// what they are multiplied by. Less than kLeastAmax counts as kLeastAmax, so that neither of both
/// is infinite or subnormal; infinity as the largest fp32. Of nothing but zeros it is 1.
template <class V>
struct WrittenScale {
  static constexpr float kLeastAmax = 0x1p-100F, kMostAmax = 0x1.fffffep127F;

  V scale{1.0F}, factor{1.0F};

  /// amax: not negative, and no NaN.
  TESSERA_HD static constexpr WrittenScale of(V amax, float limit) {
    // By bits, as comparisons of a GPU may take what is subnormal for 0.
    const auto bits = __builtin_bit_cast(std::uint32_t, amax);
    if (bits == 0) return {};
    const V least(kLeastAmax), most(kMostAmax), whole(limit);
    const V counted = bits < __builtin_bit_cast(std::uint32_t, kLeastAmax)  ? least
                      : bits > __builtin_bit_cast(std::uint32_t, kMostAmax) ? most
                                                                            : amax;
    return {counted / whole, whole / counted};
  }
};

/// The nearest e4m3, ties to even, of a magnitude beyond 448 the one of 448; 0x7F of NaN.
TESSERA_HD constexpr std::uint32_t to_e4m3(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU, sign = (bits >> 24) & 0x80U;
  if (magnitude > 0x7F800000U) return 0x7FU;
  if (magnitude >= 0x43E00000U) return sign | 0x7EU;
  // What is subnormal has steps of 2^-9: those of fp32 at 2^14.
  if (magnitude < 0x3C800000U) {
    const float steps = __builtin_bit_cast(float, magnitude) + 0x1p14F;
    return sign | (__builtin_bit_cast(std::uint32_t, steps) - 0x46800000U);
  }
  const std::uint32_t rounded = (magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20;
  return sign | (rounded - (120U << 3));
}

/// The nearest i8 as a byte, ties to even, at most 127 in magnitude; 0 of NaN.
TESSERA_HD constexpr std::uint32_t to_i8(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0;
  const float size = magnitude > 0x42FE0000U ? 127.0F : __builtin_bit_cast(float, magnitude);
  // The steps of fp32 at 2^23 are 1.
  const std::uint32_t steps = __builtin_bit_cast(std::uint32_t, size + 0x1p23F) & 0xFFU;
  return (bits >> 31 != 0 ? 0U - steps : steps) & 0xFFU;
}

/// Neighbouring rows of one sequence.
struct RowRange {
  int batch = 0, begin = 0, end = 0;
};

/// The rows of all sequences, queries or keys, in pieces of so many; every sequence begins one.
struct RowPieces {
  const std::int32_t* cu_seqlens = nullptr;  ///< null: seqlen each
  int seqlen = 0, batch = 0;
  Divisor rows;          ///< of a piece
  Divisor per_sequence;  ///< pieces of one; packed: not looked at

  constexpr RowPieces() = default;
  TESSERA_HD constexpr RowPieces(const std::int32_t* cu, int each, int sequences, int of_piece)
      : cu_seqlens(cu),
        seqlen(each),
        batch(sequences),
        rows(of_piece),
        per_sequence(core::ceil_div(each, rows)) {}

  /// total: rows of packed sequences. Some of theirs are empty.
  TESSERA_HD constexpr std::int64_t count(std::int64_t total) const {
    if (cu_seqlens == nullptr) return std::int64_t{batch} * per_sequence.value();
    return total / rows.value() + batch;
  }
  TESSERA_HD constexpr RowRange of(std::int64_t piece) const {
    int b = 0, first = 0, length = seqlen;
    if (cu_seqlens == nullptr) {
      b = static_cast<int>(per_sequence.quotient(piece));
      first = per_sequence.remainder(piece);
    } else {
      for (int end = batch; end - b > 1;) {  // the last one that begins at the piece or before
        const int middle = b + (end - b) / 2;
        (rows.quotient(cu_seqlens[middle]) + middle <= piece ? b : end) = middle;
      }
      first = static_cast<int>(piece) - rows.quotient(cu_seqlens[b]) - b;
      length = cu_seqlens[b + 1] - cu_seqlens[b];
    }
    const std::int64_t begin = std::int64_t{first} * rows.value();
    if (begin >= length) return {b, length, length};
    const std::int64_t end = begin + rows.value();
    return {b, static_cast<int>(begin), static_cast<int>(min<std::int64_t>(end, length))};
  }
  friend constexpr bool operator==(const RowPieces&, const RowPieces&) = default;
};

/// At which positions rows are rotated: keys from `starts` on, queries so that the last one is
/// where the last key is.
struct RowPositions {
  const std::int32_t* starts = nullptr;  ///< null: 0
  bool constant_q = false;               ///< all queries have the first one's

  TESSERA_HD constexpr std::int64_t of_key(const Sequence& sequence, int key) const {
    return (starts == nullptr ? std::int64_t{0} : std::int64_t{starts[sequence.batch]}) + key;
  }
  TESSERA_HD constexpr std::int64_t of_query(const Sequence& sequence, int query) const {
    return of_key(sequence, sequence.seqlen_k - sequence.seqlen_q) + (constant_q ? 0 : query);
  }
  friend constexpr bool operator==(const RowPositions&, const RowPositions&) = default;
};

}  // namespace tessera::core
