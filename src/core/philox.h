// The dropout mask (S8): Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011), keyed by (seed, offset), counted by (batch, head, query, key). It depends on
// nothing else, so every backend, tile size and pass draws the same mask. One call serves an octet:
// eight neighbouring keys of a query. dropout_octet, dropout_word and dropout_half say which 16
// bits are a key's, dropout_keeps what they mean.
#pragma once

#include "core/hd.h"

namespace tessera::core {

/// Four words of random bits. U is std::uint32_t or a vector of them.
template <class U>
struct Philox4 {
  U word[4];
};

TESSERA_HD constexpr void mul_hi_lo(std::uint32_t a, std::uint32_t b, std::uint32_t& hi,
                                    std::uint32_t& lo) {
  const std::uint64_t product = std::uint64_t{a} * b;
  hi = static_cast<std::uint32_t>(product >> 32);
  lo = static_cast<std::uint32_t>(product);
}

/// U needs ^, construction from std::uint32_t, and mul_hi_lo(U, U, U& hi, U& lo).
template <class U>
TESSERA_HD constexpr Philox4<U> philox4x32_10(Philox4<U> counter, std::uint32_t key0,
                                              std::uint32_t key1) {
  U c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    U hi0{}, lo0{}, hi1{}, lo1{};
    mul_hi_lo(c0, U(0xD2511F53U), hi0, lo0);
    mul_hi_lo(c2, U(0xCD9E8D57U), hi1, lo1);
    c0 = hi1 ^ c1 ^ U(key0);
    c1 = lo1;
    c2 = hi0 ^ c3 ^ U(key1);
    c3 = lo0;
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

/// A dropout probability and its random stream, folded.
struct Dropout {
  std::uint32_t key0 = 0, key1 = 0;
  std::uint32_t threshold =
      0;  ///< a key is kept when its 16 random bits are >= threshold; 0: no dropout
  float keep_scale = 1.0F;  ///< 1 / (probability to keep), by the threshold actually used

  TESSERA_HD constexpr bool active() const { return threshold != 0; }
};

inline constexpr int kPhiloxKeys = 8;  ///< keys served by one call

/// p in [0, 1): rounded to a multiple of 2^-16, at most 1 - 2^-16.
TESSERA_HD constexpr Dropout make_dropout(float p, std::uint64_t seed, std::uint64_t offset) {
  if (!(p > 0.0F)) return {};
  const auto rounded = static_cast<std::uint32_t>(p * 65536.0F + 0.5F);
  const std::uint32_t threshold = max(1U, min(rounded, 65535U));
  // Seed and offset together have 128 bits, Philox's key 64: one Philox call mixes them.
  const Philox4<std::uint32_t> mixed = philox4x32_10<std::uint32_t>(
      {{static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> 32), 0, 0}},
      static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  return {mixed.word[0], mixed.word[1], threshold,
          65536.0F / (65536.0F - static_cast<float>(threshold))};
}

/// Random bits of keys [8 * octet, 8 * octet + 8) of one query (or of a vector of queries).
template <class U>
TESSERA_HD constexpr Philox4<U> dropout_bits(const Dropout& dropout, U batch, U head, U query,
                                             U octet) {
  return philox4x32_10<U>({{octet, query, head, batch}}, dropout.key0, dropout.key1);
}

// Where a key's 16 bits are: half key & 1 of word (key >> 1) & 3 of the call with counter key >> 3.
// Key is an integer of any kind, or a vector of them.

template <class Key>
TESSERA_HD constexpr Key dropout_octet(Key key) {
  return key >> 3;
}
template <class Key>
TESSERA_HD constexpr Key dropout_word(Key key) {
  return (key >> 1) & Key(3);
}
/// word: that of the key, or of the same key of many rows.
template <class U>
TESSERA_HD constexpr U dropout_half(U word, int key) {
  return (key & 1) != 0 ? word >> 16 : word & U(0xFFFFU);
}

/// Is the weight of a key kept, by its 16 bits? Of a vector: whose are.
template <class U>
TESSERA_HD constexpr auto dropout_keeps(const Dropout& dropout, U half) {
  return half >= U(dropout.threshold);
}

/// The same, by the bits of the key's octet.
template <class U>
TESSERA_HD constexpr auto dropout_keeps(const Dropout& dropout, const Philox4<U>& bits, int key) {
  return dropout_keeps(dropout, dropout_half(bits.word[dropout_word(key)], key));
}

/// Is the weight of this key kept?
TESSERA_HD constexpr bool dropout_keeps(const Dropout& dropout, int batch, int head, int query,
                                        int key) {
  return dropout_keeps(dropout,
                       dropout_bits<std::uint32_t>(dropout, static_cast<std::uint32_t>(batch),
                                                   static_cast<std::uint32_t>(head),
                                                   static_cast<std::uint32_t>(query),
                                                   static_cast<std::uint32_t>(dropout_octet(key))),
                       key);
}

}  // namespace tessera::core
