// The SIMD vocabulary (simd.h) in compiler vector extensions alone: 128-bit vectors, which every
// 64-bit processor has (SSE2, NEON). Included by simd.h only.
#pragma once

namespace tessera::cpu::TESSERA_ISA {

TESSERA_INLINE F32::F32(float x) : v{x, x, x, x} {}
TESSERA_INLINE I32::I32(std::int32_t x) : v{x, x, x, x} {}
TESSERA_INLINE U32::U32(std::uint32_t x) : v{x, x, x, x} {}

// ---- masks: all ones or all zeros per lane ----
struct Mask {
  NativeVector<std::int32_t> v;
};
TESSERA_INLINE Mask operator&(Mask a, Mask b) { return {a.v & b.v}; }
TESSERA_INLINE Mask operator|(Mask a, Mask b) { return {a.v | b.v}; }
TESSERA_INLINE Mask operator^(Mask a, Mask b) { return {a.v ^ b.v}; }
TESSERA_INLINE Mask operator~(Mask a) { return {~a.v}; }
TESSERA_INLINE std::uint32_t to_bits(Mask a) {
  return static_cast<std::uint32_t>((a.v[0] & 1) | (a.v[1] & 2) | (a.v[2] & 4) | (a.v[3] & 8));
}
TESSERA_INLINE bool any(Mask a) { return to_bits(a) != 0; }
TESSERA_INLINE bool all(Mask a) { return to_bits(a) == 0xFU; }

TESSERA_INLINE Mask operator<(F32 a, F32 b) { return {a.v < b.v}; }
TESSERA_INLINE Mask operator<=(F32 a, F32 b) { return {a.v <= b.v}; }
TESSERA_INLINE Mask operator>(F32 a, F32 b) { return {a.v > b.v}; }
TESSERA_INLINE Mask operator>=(F32 a, F32 b) { return {a.v >= b.v}; }
TESSERA_INLINE Mask operator==(F32 a, F32 b) { return {a.v == b.v}; }
TESSERA_INLINE Mask operator!=(F32 a, F32 b) { return {a.v != b.v}; }
TESSERA_INLINE Mask operator<(I32 a, I32 b) { return {a.v < b.v}; }
TESSERA_INLINE Mask operator<=(I32 a, I32 b) { return {a.v <= b.v}; }
TESSERA_INLINE Mask operator>(I32 a, I32 b) { return {a.v > b.v}; }
TESSERA_INLINE Mask operator>=(I32 a, I32 b) { return {a.v >= b.v}; }
TESSERA_INLINE Mask operator==(I32 a, I32 b) { return {a.v == b.v}; }
TESSERA_INLINE Mask operator<(U32 a, U32 b) { return {a.v < b.v}; }
TESSERA_INLINE Mask operator<=(U32 a, U32 b) { return {a.v <= b.v}; }
TESSERA_INLINE Mask operator>(U32 a, U32 b) { return {a.v > b.v}; }
TESSERA_INLINE Mask operator>=(U32 a, U32 b) { return {a.v >= b.v}; }
TESSERA_INLINE Mask operator==(U32 a, U32 b) { return {a.v == b.v}; }

TESSERA_INLINE U32 select(Mask m, U32 a, U32 b) {
  const U32 choice = U32((NativeVector<std::uint32_t>)m.v);
  return b ^ ((a ^ b) & choice);
}
TESSERA_INLINE F32 select(Mask m, F32 a, F32 b) {
  return f32_from_bits(select(m, bits(a), bits(b)));
}
TESSERA_INLINE I32 select(Mask m, I32 a, I32 b) {
  return i32_from_bits(select(m, bits(a), bits(b)));
}

// ---- arithmetic ----
TESSERA_INLINE I32 iota() { return I32(NativeVector<std::int32_t>{0, 1, 2, 3}); }
TESSERA_INLINE Mask first_lanes(std::int64_t n) {
  return iota() < I32(static_cast<std::int32_t>(n < 0 ? 0 : n > kLanes ? kLanes : n));
}
// The build lets the compiler contract these where the machine has a fused instruction.
TESSERA_INLINE F32 fma(F32 a, F32 b, F32 c) { return F32(a.v * b.v + c.v); }
TESSERA_INLINE F32 fms(F32 a, F32 b, F32 c) { return F32(a.v * b.v - c.v); }
TESSERA_INLINE F32 fnma(F32 a, F32 b, F32 c) { return F32(c.v - a.v * b.v); }
TESSERA_INLINE F32 fused(F32 a, F32 b, F32 c) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; ++i) c.v[i] = core::fused(a.v[i], b.v[i], c.v[i]);
  return c;
}
#if defined(__SSE2__)
TESSERA_INLINE F32 max(F32 a, F32 b) { return F32(__builtin_ia32_maxps(a.v, b.v)); }
TESSERA_INLINE F32 min(F32 a, F32 b) { return F32(__builtin_ia32_minps(a.v, b.v)); }
#else
TESSERA_INLINE F32 max(F32 a, F32 b) { return select(a > b, a, b); }
TESSERA_INLINE F32 min(F32 a, F32 b) { return select(a < b, a, b); }
#endif
TESSERA_INLINE F32 to_f32(I32 a) { return F32(__builtin_convertvector(a.v, NativeVector<float>)); }
/// |a| < 2^22: adding 1.5 * 2^23 leaves the nearest integer in the low bits.
TESSERA_INLINE I32 round_to_i32(F32 a) {
  return i32_from_bits(bits(a + F32(12582912.0F)) - U32(0x4B400000U));
}

TESSERA_INLINE U32 operator*(U32 a, U32 b) { return U32(a.v * b.v); }
TESSERA_INLINE void mul_hi_lo(U32 a, U32 b, U32& hi, U32& lo) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; ++i) {
    const std::uint64_t product = std::uint64_t{a.v[i]} * b.v[i];
    hi.v[i] = static_cast<std::uint32_t>(product >> 32);
    lo.v[i] = static_cast<std::uint32_t>(product);
  }
}

// ---- across lanes ----
TESSERA_INLINE float reduce_add(F32 a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
TESSERA_INLINE float reduce_max(F32 a) {
  const float even = a.v[0] > a.v[2] ? a.v[0] : a.v[2];
  const float odd = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return even > odd ? even : odd;
}

TESSERA_INLINE void transpose(F32 (&rows)[kLanes]) {
  const auto a = __builtin_shufflevector(rows[0].v, rows[1].v, 0, 4, 1, 5);
  const auto b = __builtin_shufflevector(rows[0].v, rows[1].v, 2, 6, 3, 7);
  const auto c = __builtin_shufflevector(rows[2].v, rows[3].v, 0, 4, 1, 5);
  const auto d = __builtin_shufflevector(rows[2].v, rows[3].v, 2, 6, 3, 7);
  rows[0] = F32(__builtin_shufflevector(a, c, 0, 1, 4, 5));
  rows[1] = F32(__builtin_shufflevector(a, c, 2, 3, 6, 7));
  rows[2] = F32(__builtin_shufflevector(b, d, 0, 1, 4, 5));
  rows[3] = F32(__builtin_shufflevector(b, d, 2, 3, 6, 7));
}

TESSERA_INLINE F32 sum_rows(const F32 (&rows)[kLanes]) {
  F32 t[kLanes] = {rows[0], rows[1], rows[2], rows[3]};
  transpose(t);
  return (t[0] + t[2]) + (t[1] + t[3]);
}

// ---- parts of vectors ----
// NOLINTBEGIN(bugprone-macro-parentheses): the arguments are types
#define TESSERA_PARTS(Vector, Element)                                        \
  TESSERA_INLINE Vector load_n(const Element* p, std::int64_t n) {            \
    Element part[kLanes] = {};                                                \
    __builtin_memcpy(part, p, sizeof(Element) * static_cast<std::size_t>(n)); \
    return load(part);                                                        \
  }                                                                           \
  TESSERA_INLINE void store_n(Element* p, Vector a, std::int64_t n) {         \
    Element part[kLanes];                                                     \
    store(part, a);                                                           \
    __builtin_memcpy(p, part, sizeof(Element) * static_cast<std::size_t>(n)); \
  }
TESSERA_PARTS(F32, float)
TESSERA_PARTS(U32, std::uint32_t)
TESSERA_PARTS(I32, std::int32_t)
#undef TESSERA_PARTS
// NOLINTEND(bugprone-macro-parentheses)

// ---- 16-bit elements ----
using HalfVector __attribute__((vector_size(kVectorBytes / 2))) = std::uint16_t;
TESSERA_INLINE U32 load_u8(const void* p) {
  using Bytes __attribute__((vector_size(kLanes))) = std::uint8_t;
  Bytes x;
  __builtin_memcpy(&x, p, sizeof x);
  return U32(__builtin_convertvector(x, NativeVector<std::uint32_t>));
}
TESSERA_INLINE I32 load_i8(const void* p) {
  using Bytes __attribute__((vector_size(kLanes))) = std::int8_t;
  Bytes x;
  __builtin_memcpy(&x, p, sizeof x);
  return I32(__builtin_convertvector(x, NativeVector<std::int32_t>));
}
TESSERA_INLINE U32 load_u16(const void* p) {
  HalfVector x;
  __builtin_memcpy(&x, p, sizeof x);
  return U32(__builtin_convertvector(x, NativeVector<std::uint32_t>));
}
TESSERA_INLINE U32 load_u16_n(const void* p, std::int64_t n) {
  std::uint16_t part[kLanes] = {};
  __builtin_memcpy(part, p, static_cast<std::size_t>(2 * n));
  return load_u16(part);
}
TESSERA_INLINE void store_u16(void* p, U32 a) {
  const HalfVector x = __builtin_convertvector(a.v, HalfVector);
  __builtin_memcpy(p, &x, sizeof x);
}
TESSERA_INLINE void store_u16_n(void* p, U32 a, std::int64_t n) {
  const HalfVector x = __builtin_convertvector(a.v, HalfVector);
  __builtin_memcpy(p, &x, static_cast<std::size_t>(2 * n));
}

TESSERA_INLINE void store_u8(void* p, U32 a) {
  using Bytes __attribute__((vector_size(kLanes))) = std::uint8_t;
  const Bytes x = __builtin_convertvector(a.v, Bytes);
  __builtin_memcpy(p, &x, sizeof x);
}

/// fp16 to f32: the exponent is rebased by a multiplication, which also normalises denormals.
TESSERA_INLINE F32 widen_f16(U32 h) {
  const U32 magnitude = h & U32(0x7FFFU);
  const F32 finite = f32_from_bits(magnitude << 13) * F32(0x1p112F);
  const U32 special = select(magnitude < U32(0x7C00U), U32(0U), U32(0x7F800000U));
  return f32_from_bits(bits(finite) | special | ((h & U32(0x8000U)) << 16));
}
/// f32 to fp16, nearest even, in the low half of each lane.
TESSERA_INLINE U32 narrow_f16(F32 a) {
  const U32 sign = (bits(a) >> 16) & U32(0x8000U);
  const U32 x = bits(a) & U32(0x7FFFFFFFU);
  const U32 normal = (x - U32(112U << 23) + U32(0xFFFU) + ((x >> 13) & U32(1U))) >> 13;
  // Below 2^-14, adding 0.5 aligns the value with a float whose last bit is worth 2^-24.
  const U32 denormal = bits(f32_from_bits(x) + F32(0.5F)) - U32(0x3F000000U);
  const U32 nan = U32(0x7E00U) | ((x >> 13) & U32(0x3FFU));
  U32 h = select(x < U32(0x38800000U), denormal, normal);
  h = select(x >= U32(0x477FF000U), U32(0x7C00U), h);
  h = select(x > U32(0x7F800000U), nan, h);
  return h | sign;
}
TESSERA_INLINE F32 load(const F16* p) { return widen_f16(load_u16(p)); }
TESSERA_INLINE F32 load_n(const F16* p, std::int64_t n) { return widen_f16(load_u16_n(p, n)); }
TESSERA_INLINE void store(F16* p, F32 a) { store_u16(p, narrow_f16(a)); }
TESSERA_INLINE void store_n(F16* p, F32 a, std::int64_t n) { store_u16_n(p, narrow_f16(a), n); }

// ---- range reduction of exp2 ----
/// Sets fraction = x - floor(x), for x clamped to [-127, 128] (NaN passes), and returns the factor
/// 2^floor(x): the exponent field is built by integer arithmetic, so 2^-127 becomes 0.
TESSERA_INLINE F32 split_exp2(F32 x, F32& fraction) {
  const F32 clamped = max(F32(-127.0F), min(F32(128.0F), x));
  const I32 nearest = round_to_i32(clamped);
  const F32 rest = clamped - to_f32(nearest);
  const Mask above =
      rest < F32(0.0F);  // -1 in the lanes where the nearest integer is not the floor
  fraction = select(above, rest + F32(1.0F), rest);
  return f32_from_bits((bits(nearest) + U32((NativeVector<std::uint32_t>)above.v) + U32(127U))
                       << 23);
}
TESSERA_INLINE F32 join_exp2(F32 y, F32 factor) { return y * factor; }

}  // namespace tessera::cpu::TESSERA_ISA
