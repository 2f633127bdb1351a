// What stands between a product and its weight besides scale, softcap and mask, for rows that lie
// in lanes: bias, ALiBi, dropout. The forward and the backward share it, so they make the same
// weights.
#pragma once

#include "core/philox.h"
#include "cpu/copy.h"
#include "cpu/math.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

/// The weight of a score. Weights of bf16 pairs are rounded for the product that follows, so a
/// short exponential serves them.
template <bool kPairs>
TESSERA_INLINE F32 weight(F32 x) {
  if constexpr (kPairs) {
    return exp2_short(x);
  } else {
    return exp2(x);
  }
}

/// Rows by their query and head, in arrays that the caller fills.
struct LaneRows {
  const RowMap& map;
  const std::int32_t* query;
  const std::int32_t* head;

  /// ALiBi's slopes of kLanes rows from r on, and their key positions seen from first_key; 0
  /// without ALiBi.
  TESSERA_INLINE void load_alibi(int r, int first_key, F32& slope, F32& position) const {
    slope = position = F32{};
    if (map.problem.alibi == PerHead::none) return;
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = map.alibi_slope(head[r + i]);
    slope = load(lanes);
    position = to_f32(load(query + r) + I32(map.position_of(0) - first_key));
  }

  /// out[i * stride + lane] = the bias of row r + lane for key keys.begin + i, in base 2.
  [[gnu::noinline]] void load_bias(int r, core::Range keys, float* out, std::int64_t stride) const {
    with_storage(map.problem.bias->dtype, [&](auto storage) {
      using T = decltype(storage);
      const core::BiasStrides strides = map.bias_strides();
      const T* row[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        row[i] = static_cast<const T*>(map.tensors.bias.data) +
                 strides.offset(map.batch, head[r + i], query[r + i], keys.begin);
      }
      if (strides.key == 1) {
        rows_to_vectors(row, keys.size(), F32(core::kLog2e), out, stride);
        return;
      }
      for (int key = 0; key < keys.size(); ++key, out += stride) {
        for (int i = 0; i < kLanes; ++i) {
          out[i] = lane(load_n(row[i] + key * strides.key, 1), 0) * core::kLog2e;
        }
      }
    });
  }

  /// Random bits of the eight keys around `key`, for kLanes rows from r on.
  TESSERA_INLINE core::Philox4<U32> draw(const core::Dropout& dropout, int r, int key) const {
    return core::dropout_bits(dropout, U32(static_cast<std::uint32_t>(map.batch)),
                              bits(load(head + r)), bits(load(query + r)),
                              U32(static_cast<std::uint32_t>(core::dropout_octet(key))));
  }
};

/// S1 up to the mask, for kLanes rows and one key: base-2 scores of raw products. bias: of these
/// rows, in base 2, if the problem has one.
TESSERA_INLINE F32 score_of(const Problem& problem, const core::Score& score, F32 product,
                            const float* bias, F32 slope, F32 distance) {
  const F32 x = core::score2(score, product);
  const F32 bias2 = problem.bias ? load(bias) : F32{};
  return core::add_to_score(x, problem.bias.has_value(), bias2, problem.alibi != PerHead::none,
                            slope, distance);
}

/// Which of kLanes keys of one row keep their weight; bits: of every lane's own octet.
TESSERA_INLINE Mask keeps_lanes(const core::Dropout& dropout, const core::Philox4<U32>& bits,
                                U32 keys) {
  const U32 number = core::dropout_word(keys);
  U32 word = bits.word[0];
  for (std::uint32_t w = 1; w < 4; ++w) word = select(number == U32(w), bits.word[w], word);
  const Mask odd = (keys & U32(1U)) == U32(1U);
  return core::dropout_keeps(dropout,
                             select(odd, core::dropout_half(word, 1), core::dropout_half(word, 0)));
}

}  // namespace tessera::cpu::TESSERA_ISA
