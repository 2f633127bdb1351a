// What decoding over caches of 8 bits has besides (S14): the types that rows take, blocks of e4m3
// that become fp16 before they are multiplied as fp32, and scales. Where bf16 is multiplied, bytes
// become bf16 in registers (decode_tile.h).
#pragma once

#include "core/scales.h"
#include "cpu/copy.h"
#include "cpu/decode_requests.h"

namespace tessera::cpu::TESSERA_ISA {

/// Calls body(T{}) with the type of k and v, as rows with these operands take them.
template <core::Operand kOperand, class Body>
TESSERA_INLINE void with_cached_storage(Dtype dtype, const Body& body) {
  if constexpr (kOperand == core::Operand::bf16) {
    switch (dtype) {
      case Dtype::e4m3: return body(E4m3{});
      case Dtype::i8: return body(I8{});
      default: return body(Bf16{});
    }
  } else {
    with_any_storage(dtype, body);
  }
}

/// Whether rows of T are copied as fp16 first, of which a vector is widened to fp32 by one
/// instruction. Of e4m3 that takes several, and each row of K is read for every tile of query rows.
template <class T, core::Operand kOperand>
inline constexpr bool kThroughF16 =
    kHasF16 && kOperand == core::Operand::f32 && std::is_same_v<T, E4m3>;
/// What the elements of such copies are to be multiplied by.
template <class T, core::Operand kOperand>
inline constexpr float kUnit = kThroughF16<T, kOperand> ? 256.0F : 1.0F;

#if TESSERA_ISA_CODE >= 1
/// NaN among the rows that are copied to `out`.
[[gnu::noinline]] inline void copy_nan(const KeyRows<E4m3>& rows, core::Range keys, F16* out,
                                       std::int64_t stride) {
  for (int key = keys.begin; key < keys.end; ++key, out += stride) {
    for (std::int64_t i = 0; i < rows.n; ++i) {
      if ((rows[key][i].bits & 0x7F) == 0x7F) out[i].bits = 0x7E00;
    }
  }
}

/// Copies rows to `out`, `stride` elements apart: a multiple of 64. Zeros follow them there.
[[gnu::noinline]] inline KeyBlock<F16> copy_as_f16(const KeyRows<E4m3> rows, core::Range keys,
                                                   F16* out, std::int64_t stride) {
  constexpr int kStep = NanOfE4m3::kBytes, kHalf = 2 * kLanes;
  static_assert(kStep == 2 * kHalf && 64 % kStep == 0);
  NanOfE4m3 nan;
  const auto copy = [&nan](const E4m3* from, F16* to) {
    nan.look_at(from);
    e4m3_to_f16(from, to);
    e4m3_to_f16(from + kHalf, to + kHalf);
  };
  F16* to = out;
  for (int key = keys.begin; key < keys.end; ++key, to += stride) {
    const E4m3* from = rows[key];
    std::int64_t i = 0;
    for (; i + kStep <= rows.n; i += kStep) copy(from + i, to + i);
    if (i < rows.n) {
      E4m3 part[kStep] = {};
      __builtin_memcpy(part, from + i, static_cast<std::size_t>(rows.n - i));
      copy(part, to + i);
    }
  }
  if (nan.found()) copy_nan(rows, keys, out, stride);
  const std::int64_t whole = core::round_up<std::int64_t>(rows.n, kLanes);
  return {KeyRows<F16>{out, {0, stride, 0}, whole, nullptr, keys.begin}, keys};
}
#endif

/// Scales of a sequence's keys or values by token, as numbers side by side: of a chunk of keys of
/// one head, and ones up to a whole vector.
inline void load_scales(const core::Scales& scales, const KeyPlaces& places, core::Range keys,
                        int head, float* out) {
  while (!keys.empty()) {
    const int count = places.together(keys);
    const float* from = scales.of_key(places.pages, places.sequence, keys.begin, head);
    for (int i = 0; i < count; ++i) out[i] = from[i * scales.stride_seqlen];
    keys.begin += count;
    out += count;
  }
  for (int i = 0; i < kLanes - 1; ++i) out[i] = 1.0F;
}

}  // namespace tessera::cpu::TESSERA_ISA
