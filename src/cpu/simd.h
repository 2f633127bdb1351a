// The SIMD vocabulary of the CPU kernels: vectors of kLanes 32-bit elements as values with
// operators. A translation unit is compiled once per instruction set with -DTESSERA_ISA=portable |
// avx2 | avx512 | avx512_bf16 and that set's flags (cmake/isa.cmake); everything here lives in a
// namespace of that name and is always inlined, so no copy made for one set can end up in another's
// code. This file holds what compiler vector extensions express on any machine; simd_<set>.h holds
// the rest.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/hd.h"

#define TESSERA_ISA_CODE_portable 0
#define TESSERA_ISA_CODE_avx2 1
#define TESSERA_ISA_CODE_avx512 2
#define TESSERA_ISA_CODE_avx512_bf16 3
#define TESSERA_ISA_PASTE2(a, b) a##b
#define TESSERA_ISA_PASTE(a, b) TESSERA_ISA_PASTE2(a, b)
#define TESSERA_ISA_CODE TESSERA_ISA_PASTE(TESSERA_ISA_CODE_, TESSERA_ISA)

#if TESSERA_ISA_CODE > 0
#include <immintrin.h>
#endif

#define TESSERA_INLINE inline __attribute__((always_inline))

namespace tessera::cpu {

/// Storage of 16-bit floating point elements; vectors of them are loaded to and stored from F32.
struct Bf16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};
/// The same of 8 bits; vectors of them are loaded to F32, and stored from it saturated.
struct E4m3 {
  std::uint8_t bits;
};
struct I8 {
  std::int8_t value;
};

}  // namespace tessera::cpu

namespace tessera::cpu::TESSERA_ISA {

inline constexpr int kLanes = TESSERA_ISA_CODE >= 2 ? 16 : TESSERA_ISA_CODE == 1 ? 8 : 4;
/// Vectors across one tile, and its width: the queries (or head dimensions) a product works on at
/// once.
inline constexpr int kNV = 2;
inline constexpr int kTile = kNV * kLanes;
/// Is there an instruction that widens fp16?
inline constexpr bool kHasF16 = TESSERA_ISA_CODE >= 1;
/// Is there an instruction for sums of bf16 products? If not, kernels widen bf16 to f32 first.
inline constexpr bool kHasBf16Dot = TESSERA_ISA_CODE == 3;
template <class T>
class WidenBytes;  // of the last set alone

inline constexpr int kVectorBytes = 4 * kLanes;
template <class T>
using NativeVector __attribute__((vector_size(kVectorBytes))) = T;
/// The same at any address: what loads and stores go through. Not one template: clang 19 forgets
/// aligned(4) where the element type is a template parameter.
using LooseF32 __attribute__((vector_size(kVectorBytes), aligned(4), may_alias)) = float;
using LooseI32 __attribute__((vector_size(kVectorBytes), aligned(4), may_alias)) = std::int32_t;
using LooseU32 __attribute__((vector_size(kVectorBytes), aligned(4), may_alias)) = std::uint32_t;
static_assert(alignof(LooseF32) == 4 && alignof(LooseI32) == 4 && alignof(LooseU32) == 4);

/// T{x} repeats x in every lane, T{} is zero.
struct F32 {
  NativeVector<float> v;
  F32() = default;
  TESSERA_INLINE explicit F32(NativeVector<float> x) : v(x) {}
  TESSERA_INLINE explicit F32(float x);
};
struct I32 {
  NativeVector<std::int32_t> v;
  I32() = default;
  TESSERA_INLINE explicit I32(NativeVector<std::int32_t> x) : v(x) {}
  TESSERA_INLINE explicit I32(std::int32_t x);
};
struct U32 {
  NativeVector<std::uint32_t> v;
  U32() = default;
  TESSERA_INLINE explicit U32(NativeVector<std::uint32_t> x) : v(x) {}
  TESSERA_INLINE explicit U32(std::uint32_t x);
};

// ---- reinterpretation ----
TESSERA_INLINE U32 bits(F32 a) { return U32((NativeVector<std::uint32_t>)a.v); }
TESSERA_INLINE U32 bits(I32 a) { return U32((NativeVector<std::uint32_t>)a.v); }
TESSERA_INLINE F32 f32_from_bits(U32 a) { return F32((NativeVector<float>)a.v); }
TESSERA_INLINE I32 i32_from_bits(U32 a) { return I32((NativeVector<std::int32_t>)a.v); }

// ---- arithmetic; integers wrap ----
TESSERA_INLINE F32 operator+(F32 a, F32 b) { return F32(a.v + b.v); }
TESSERA_INLINE F32 operator-(F32 a, F32 b) { return F32(a.v - b.v); }
TESSERA_INLINE F32 operator*(F32 a, F32 b) { return F32(a.v * b.v); }
TESSERA_INLINE F32 operator/(F32 a, F32 b) { return F32(a.v / b.v); }
TESSERA_INLINE F32 operator-(F32 a) { return F32(-a.v); }
TESSERA_INLINE F32& operator+=(F32& a, F32 b) { return a = a + b; }
TESSERA_INLINE F32& operator-=(F32& a, F32 b) { return a = a - b; }
TESSERA_INLINE F32& operator*=(F32& a, F32 b) { return a = a * b; }
TESSERA_INLINE U32 operator+(U32 a, U32 b) { return U32(a.v + b.v); }
TESSERA_INLINE U32 operator-(U32 a, U32 b) { return U32(a.v - b.v); }
TESSERA_INLINE U32 operator&(U32 a, U32 b) { return U32(a.v & b.v); }
TESSERA_INLINE U32 operator|(U32 a, U32 b) { return U32(a.v | b.v); }
TESSERA_INLINE U32 operator^(U32 a, U32 b) { return U32(a.v ^ b.v); }
TESSERA_INLINE U32 operator<<(U32 a, int n) { return U32(a.v << static_cast<std::uint32_t>(n)); }
TESSERA_INLINE U32 operator>>(U32 a, int n) { return U32(a.v >> static_cast<std::uint32_t>(n)); }
TESSERA_INLINE I32 operator+(I32 a, I32 b) { return i32_from_bits(bits(a) + bits(b)); }
TESSERA_INLINE I32 operator-(I32 a, I32 b) { return i32_from_bits(bits(a) - bits(b)); }
/// Arithmetic shift.
TESSERA_INLINE I32 operator>>(I32 a, int n) { return I32(a.v >> n); }
TESSERA_INLINE F32 abs(F32 a) { return f32_from_bits(bits(a) & U32(0x7FFFFFFFU)); }
/// |magnitude| with the sign of `sign`.
TESSERA_INLINE F32 copysign(F32 magnitude, F32 sign) {
  return f32_from_bits((bits(magnitude) & U32(0x7FFFFFFFU)) | (bits(sign) & U32(0x80000000U)));
}

// ---- loads and stores, whole vectors, any alignment ----
TESSERA_INLINE F32 load(const float* p) { return F32(*reinterpret_cast<const LooseF32*>(p)); }
TESSERA_INLINE I32 load(const std::int32_t* p) {
  return I32(*reinterpret_cast<const LooseI32*>(p));
}
TESSERA_INLINE U32 load(const std::uint32_t* p) {
  return U32(*reinterpret_cast<const LooseU32*>(p));
}
TESSERA_INLINE void store(float* p, F32 a) { *reinterpret_cast<LooseF32*>(p) = a.v; }
TESSERA_INLINE void store(std::int32_t* p, I32 a) { *reinterpret_cast<LooseI32*>(p) = a.v; }
TESSERA_INLINE void store(std::uint32_t* p, U32 a) { *reinterpret_cast<LooseU32*>(p) = a.v; }

/// One element, for scalar ends; not for inner loops.
TESSERA_INLINE float lane(F32 a, int i) { return a.v[i]; }
TESSERA_INLINE std::int32_t lane(I32 a, int i) { return a.v[i]; }
TESSERA_INLINE std::uint32_t lane(U32 a, int i) { return a.v[i]; }

/// What a cache line is asked for.
enum class Access { read, write };

/// Asks for the cache line that holds p, into the cache of that level. The empty statement is an
/// effect: of a function that does nothing but prefetch, GCC drops the calls.
template <int kLevel = 1, Access kAccess = Access::read>
TESSERA_INLINE void prefetch(const void* p) {
  asm volatile("");
  __builtin_prefetch(p, kAccess == Access::write ? 1 : 0, 4 - kLevel);
}

}  // namespace tessera::cpu::TESSERA_ISA

// Each of these completes the vocabulary, with the same names and meanings:
//   Mask                          one truth value per lane; comparisons of F32, I32, U32 (a
//   comparison
//                                 with NaN is false, != is true); & | ^ ~ ; any, all, to_bits
//   first_lanes(n)                true in lanes [0, n), any n
//   select(mask, a, b)            a where true
//   iota()                        I32 0, 1, 2, ...
//   fma, fms, fnma                a*b+c, a*b-c, c-a*b
//   fused                         a*b+c rounded once, on any machine
//   max(a, b), min(a, b)          if either is NaN: b
//   to_f32(I32), round_to_i32     nearest even
//   mul_hi_lo(a, b, hi, lo)       64-bit products of U32
//   reduce_add, reduce_max        over lanes, a fixed tree
//   sum_rows(rows[kLanes])        lane i: the sum over the lanes of rows[i]
//   transpose(rows[kLanes])       in place
//   load/store of Bf16, F16       kLanes elements to/from F32; stores round to nearest even
//   load_n/store_n(p, .., n)      the same for the first n elements (0 <= n <= kLanes): no access
//   past
//                                 them, missing lanes are zero
//   load_u8(p), store_u8(p, a)    kLanes bytes to U32 and back; lanes hold less than 2^8
//   load_i8(p)                    kLanes bytes with signs to I32
//   e4m3_to_f16(p, out)           kHasF16 only: 2 * kLanes bytes of e4m3 to fp16 of a 256th of
//                                 them, exactly; NaN becomes 1.875
//   NanOfE4m3                     kHasF16 only: finds those NaN among bytes that it is shown
//   load_pairs(row0, row1)        U32 of 16-bit elements (row0[i], row1[i]), the first in the low
//   half;
//                                 load_pairs_n for n of them, load_pairs_n(row0, n): row1 = zeros
//   pair_bf16(a, b)               the same from two F32, rounded
//   split_exp2 / join_exp2        the range reduction of exp2 (math.h)
//   dot_bf16(c, a, b)             kHasBf16Dot only: c + a.low*b.low + a.high*b.high
//   WidenBytes<E4m3 or I8>        kHasBf16Dot only: makes bf16 of vectors of bytes, exactly
#if TESSERA_ISA_CODE >= 2
#include "cpu/simd_avx512.h"
#elif TESSERA_ISA_CODE == 1
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_portable.h"
#endif

namespace tessera::cpu::TESSERA_ISA {

/// Lane i gets lane i ^ kStride.
template <int kStride, std::size_t... kLane>
TESSERA_INLINE F32 exchange(F32 a, std::index_sequence<kLane...> /*lanes*/) {
  return F32(__builtin_shufflevector(a.v, a.v, (static_cast<int>(kLane) ^ kStride)...));
}
template <int kStride>
TESSERA_INLINE F32 exchange(F32 a) {
  return exchange<kStride>(a, std::make_index_sequence<kLanes>{});
}

/// In place, for 32-bit elements of any meaning, e.g. pairs of bf16.
TESSERA_INLINE void transpose(U32 (&rows)[kLanes]) {
  F32 moved[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) moved[i] = f32_from_bits(rows[i]);
  transpose(moved);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = bits(moved[i]);
}

TESSERA_INLINE F32 load(const Bf16* p) { return f32_from_bits(load_u16(p) << 16); }
TESSERA_INLINE F32 load_n(const Bf16* p, std::int64_t n) {
  return f32_from_bits(load_u16_n(p, n) << 16);
}
TESSERA_INLINE U32 load_pairs(const Bf16* row0, const Bf16* row1) {
  return load_u16(row0) | (load_u16(row1) << 16);
}
TESSERA_INLINE U32 load_pairs_n(const Bf16* row0, const Bf16* row1, std::int64_t n) {
  return load_u16_n(row0, n) | (load_u16_n(row1, n) << 16);
}
TESSERA_INLINE U32 load_pairs_n(const Bf16* row0, std::int64_t n) { return load_u16_n(row0, n); }

/// The first n bytes; missing lanes are zero.
TESSERA_INLINE U32 load_u8_n(const void* p, std::int64_t n) {
  std::uint8_t part[kLanes] = {};
  __builtin_memcpy(part, p, static_cast<std::size_t>(n));
  return load_u8(part);
}

/// Bytes of e4m3 to f32, by integers and one subtraction, so that no step has a number that is
/// subnormal in f32. 0x7F and 0xFF are NaN.
TESSERA_INLINE F32 widen_e4m3(U32 x) {
  const U32 magnitude = x & U32(0x7FU), shifted = magnitude << 20;
  const F32 normal = f32_from_bits(shifted + U32(120U << 23));
  const F32 subnormal = f32_from_bits(shifted + U32(121U << 23)) - F32(0x1p-6F);
  const F32 finite = select(magnitude < U32(8U), subnormal, normal);
  const F32 value = select(magnitude == U32(0x7FU), f32_from_bits(U32(0x7FC00000U)), finite);
  return f32_from_bits(bits(value) | ((x & U32(0x80U)) << 24));
}
TESSERA_INLINE F32 load(const E4m3* p) { return widen_e4m3(load_u8(p)); }
TESSERA_INLINE F32 load_n(const E4m3* p, std::int64_t n) { return widen_e4m3(load_u8_n(p, n)); }

/// The first n bytes; lanes hold less than 2^8.
TESSERA_INLINE void store_u8_n(void* p, U32 a, std::int64_t n) {
  std::uint8_t part[kLanes];
  store_u8(part, a);
  __builtin_memcpy(p, part, static_cast<std::size_t>(n));
}

/// core::to_e4m3 and core::to_i8 of every lane.
TESSERA_INLINE U32 narrow_e4m3(F32 a) {
  const U32 x = bits(min(abs(a), F32(448.0F)));
  const U32 normal = ((x + U32(0x7FFFFU) + ((x >> 20) & U32(1U))) >> 20) - U32(120U << 3);
  const U32 subnormal = bits(f32_from_bits(x) + F32(0x1p14F)) - U32(0x46800000U);
  const U32 size = select(x < U32(0x3C800000U), subnormal, normal);
  return select(a != a, U32(0x7FU), size | ((bits(a) >> 24) & U32(0x80U)));
}
TESSERA_INLINE U32 narrow_i8(F32 a) {
  const F32 number = select(a != a, F32(0.0F), a);
  const F32 clamped = max(F32(-127.0F), min(F32(127.0F), number));
  return bits(round_to_i32(clamped)) & U32(0xFFU);
}
TESSERA_INLINE U32 narrow(E4m3 /*type*/, F32 a) { return narrow_e4m3(a); }
TESSERA_INLINE U32 narrow(I8 /*type*/, F32 a) { return narrow_i8(a); }

TESSERA_INLINE F32 load(const I8* p) { return to_f32(load_i8(p)); }
TESSERA_INLINE F32 load_n(const I8* p, std::int64_t n) {
  I8 part[kLanes] = {};
  __builtin_memcpy(part, p, static_cast<std::size_t>(n));
  return load(part);
}

#if TESSERA_ISA_CODE != 3
/// Nearest even by integer arithmetic, in the high half of each lane; NaN stays a (quiet) NaN.
TESSERA_INLINE U32 round_to_bf16(F32 a) {
  const U32 x = bits(a);
  const U32 rounded = x + U32(0x7FFFU) + ((x >> 16) & U32(1U));
  return select(a != a, x | U32(0x400000U), rounded);
}
TESSERA_INLINE void store(Bf16* p, F32 a) { store_u16(p, round_to_bf16(a) >> 16); }
TESSERA_INLINE void store_n(Bf16* p, F32 a, std::int64_t n) {
  store_u16_n(p, round_to_bf16(a) >> 16, n);
}
TESSERA_INLINE U32 pair_bf16(F32 a, F32 b) {
  return (round_to_bf16(a) >> 16) | (round_to_bf16(b) & U32(0xFFFF0000U));
}
#endif

}  // namespace tessera::cpu::TESSERA_ISA
