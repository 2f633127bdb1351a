// What stands between a product and its weight besides scale, softcap and mask, for rows that lie
// in lanes: bias, ALiBi, dropout. The forward and the backward share it, so they make the same
// weights.
#pragma once

#include "core/philox.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

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

  /// The bias of row r from `key` on; elements map.bias_key_stride() apart.
  template <class T>
  TESSERA_INLINE const T* bias(int r, int key) const {
    return static_cast<const T*>(map.tensors.bias.data) + map.bias_offset(query[r], head[r]) +
           key * map.bias_key_stride();
  }

  /// Random bits of the eight keys around `key`, for kLanes rows from r on.
  TESSERA_INLINE core::Philox4<U32> draw(const core::Dropout& dropout, int r, int key) const {
    return core::dropout_bits(dropout, U32(static_cast<std::uint32_t>(map.batch)),
                              bits(load(head + r)), bits(load(query + r)),
                              U32(static_cast<std::uint32_t>(key / core::kPhiloxKeys)));
  }
};

/// The rows whose weight of the key is kept, by their bits.
TESSERA_INLINE Mask kept(const core::Dropout& dropout, const core::Philox4<U32>& random, int key) {
  const U32 word = random.word[(key >> 1) & 3];
  const U32 half = (key & 1) != 0 ? word >> 16 : word & U32(0xFFFFU);
  return half >= U32(dropout.threshold);
}

}  // namespace tessera::cpu::TESSERA_ISA
