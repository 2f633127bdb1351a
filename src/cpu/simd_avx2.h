// The SIMD vocabulary (simd.h) for AVX2 with FMA and F16C. Included by simd.h only.
#pragma once

namespace tessera::cpu::TESSERA_ISA {

TESSERA_INLINE F32::F32(float x) : v(_mm256_set1_ps(x)) {}
TESSERA_INLINE I32::I32(std::int32_t x) : v((NativeVector<std::int32_t>)_mm256_set1_epi32(x)) {}
TESSERA_INLINE U32::U32(std::uint32_t x)
    : v((NativeVector<std::uint32_t>)_mm256_set1_epi32(static_cast<int>(x))) {}

// Intel's integer vector type, to and from.
TESSERA_INLINE __m256i native(U32 a) { return (__m256i)a.v; }
TESSERA_INLINE __m256i native(I32 a) { return (__m256i)a.v; }
TESSERA_INLINE U32 u32(__m256i a) { return U32((NativeVector<std::uint32_t>)a); }
TESSERA_INLINE I32 i32(__m256i a) { return I32((NativeVector<std::int32_t>)a); }

// ---- masks: all ones or all zeros per lane ----
struct Mask {
  NativeVector<std::int32_t> v;
};
TESSERA_INLINE Mask operator&(Mask a, Mask b) { return {a.v & b.v}; }
TESSERA_INLINE Mask operator|(Mask a, Mask b) { return {a.v | b.v}; }
TESSERA_INLINE Mask operator^(Mask a, Mask b) { return {a.v ^ b.v}; }
TESSERA_INLINE Mask operator~(Mask a) { return {~a.v}; }
TESSERA_INLINE std::uint32_t to_bits(Mask a) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)a.v));
}
TESSERA_INLINE bool any(Mask a) { return to_bits(a) != 0; }
TESSERA_INLINE bool all(Mask a) { return to_bits(a) == 0xFFU; }

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

TESSERA_INLINE F32 select(Mask m, F32 a, F32 b) {
  return F32(_mm256_blendv_ps(b.v, a.v, (__m256)m.v));
}
TESSERA_INLINE U32 select(Mask m, U32 a, U32 b) {
  return u32(_mm256_blendv_epi8(native(b), native(a), (__m256i)m.v));
}
TESSERA_INLINE I32 select(Mask m, I32 a, I32 b) {
  return i32(_mm256_blendv_epi8(native(b), native(a), (__m256i)m.v));
}

// ---- arithmetic ----
TESSERA_INLINE I32 iota() { return i32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
TESSERA_INLINE Mask first_lanes(std::int64_t n) {
  return iota() < I32(static_cast<std::int32_t>(n < 0 ? 0 : n > kLanes ? kLanes : n));
}
TESSERA_INLINE F32 fma(F32 a, F32 b, F32 c) { return F32(_mm256_fmadd_ps(a.v, b.v, c.v)); }
TESSERA_INLINE F32 fms(F32 a, F32 b, F32 c) { return F32(_mm256_fmsub_ps(a.v, b.v, c.v)); }
TESSERA_INLINE F32 fnma(F32 a, F32 b, F32 c) { return F32(_mm256_fnmadd_ps(a.v, b.v, c.v)); }
TESSERA_INLINE F32 fused(F32 a, F32 b, F32 c) { return fma(a, b, c); }
TESSERA_INLINE F32 max(F32 a, F32 b) { return F32(_mm256_max_ps(a.v, b.v)); }
TESSERA_INLINE F32 min(F32 a, F32 b) { return F32(_mm256_min_ps(a.v, b.v)); }
TESSERA_INLINE F32 to_f32(I32 a) { return F32(_mm256_cvtepi32_ps(native(a))); }
TESSERA_INLINE I32 round_to_i32(F32 a) { return i32(_mm256_cvtps_epi32(a.v)); }

TESSERA_INLINE U32 operator*(U32 a, U32 b) { return u32(_mm256_mullo_epi32(native(a), native(b))); }
TESSERA_INLINE void mul_hi_lo(U32 a, U32 b, U32& hi, U32& lo) {
  const __m256i even = _mm256_mul_epu32(native(a), native(b));
  const __m256i odd =
      _mm256_mul_epu32(_mm256_srli_epi64(native(a), 32), _mm256_srli_epi64(native(b), 32));
  hi = u32(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA));
  lo = u32(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA));
}

// ---- across lanes ----
TESSERA_INLINE float reduce_add(F32 a) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
TESSERA_INLINE float reduce_max(F32 a) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

TESSERA_INLINE __m256 unpack_low_pairs(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}
TESSERA_INLINE __m256 unpack_high_pairs(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

TESSERA_INLINE F32 sum_rows(const F32 (&rows)[kLanes]) {
  __m256 pair[4], quad[2];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    const __m256 a = rows[i].v, b = rows[i + 1].v;
    pair[i / 2] = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const __m256 a = pair[i], b = pair[i + 1];
    quad[i / 2] = _mm256_add_ps(unpack_low_pairs(a, b), unpack_high_pairs(a, b));
  }
  return F32(_mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20),
                           _mm256_permute2f128_ps(quad[0], quad[1], 0x31)));
}

TESSERA_INLINE void transpose(F32 (&rows)[kLanes]) {
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  // b[r + c]: columns c and c+4 of rows r .. r+3, one per 128-bit lane.
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4) {
    b[r] = unpack_low_pairs(a[r], a[r + 2]);
    b[r + 1] = unpack_high_pairs(a[r], a[r + 2]);
    b[r + 2] = unpack_low_pairs(a[r + 1], a[r + 3]);
    b[r + 3] = unpack_high_pairs(a[r + 1], a[r + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = F32(_mm256_permute2f128_ps(b[c], b[4 + c], 0x20));
    rows[4 + c] = F32(_mm256_permute2f128_ps(b[c], b[4 + c], 0x31));
  }
}

// ---- parts of vectors ----
TESSERA_INLINE U32 load_n(const std::uint32_t* p, std::int64_t n) {
  return u32(_mm256_maskload_epi32(reinterpret_cast<const int*>(p), (__m256i)first_lanes(n).v));
}
TESSERA_INLINE I32 load_n(const std::int32_t* p, std::int64_t n) {
  return i32(_mm256_maskload_epi32(p, (__m256i)first_lanes(n).v));
}
TESSERA_INLINE F32 load_n(const float* p, std::int64_t n) {
  return F32(_mm256_maskload_ps(p, (__m256i)first_lanes(n).v));
}
TESSERA_INLINE void store_n(std::uint32_t* p, U32 a, std::int64_t n) {
  _mm256_maskstore_epi32(reinterpret_cast<int*>(p), (__m256i)first_lanes(n).v, native(a));
}
TESSERA_INLINE void store_n(std::int32_t* p, I32 a, std::int64_t n) {
  _mm256_maskstore_epi32(p, (__m256i)first_lanes(n).v, native(a));
}
TESSERA_INLINE void store_n(float* p, F32 a, std::int64_t n) {
  _mm256_maskstore_ps(p, (__m256i)first_lanes(n).v, a.v);
}

// ---- 16-bit elements; a part of a vector goes through a small buffer ----
TESSERA_INLINE __m128i load_half_vector(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
TESSERA_INLINE __m128i load_half_vector_n(const void* p, std::int64_t n) {
  std::uint16_t part[kLanes] = {};
  __builtin_memcpy(part, p, static_cast<std::size_t>(2 * n));
  return load_half_vector(part);
}
TESSERA_INLINE void store_half_vector(void* p, __m128i a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), a);
}
TESSERA_INLINE void store_half_vector_n(void* p, __m128i a, std::int64_t n) {
  std::uint16_t part[kLanes];
  store_half_vector(part, a);
  __builtin_memcpy(p, part, static_cast<std::size_t>(2 * n));
}
TESSERA_INLINE U32 load_u8(const void* p) {
  return u32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
TESSERA_INLINE I32 load_i8(const void* p) {
  return i32(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
TESSERA_INLINE U32 load_u16(const void* p) {
  return u32(_mm256_cvtepu16_epi32(load_half_vector(p)));
}
TESSERA_INLINE U32 load_u16_n(const void* p, std::int64_t n) {
  return u32(_mm256_cvtepu16_epi32(load_half_vector_n(p, n)));
}
/// Lanes hold values below 2^16.
TESSERA_INLINE __m128i narrow(U32 a) {
  return _mm_packus_epi32(_mm256_castsi256_si128(native(a)),
                          _mm256_extracti128_si256(native(a), 1));
}
TESSERA_INLINE void store_u16(void* p, U32 a) { store_half_vector(p, narrow(a)); }
TESSERA_INLINE void store_u16_n(void* p, U32 a, std::int64_t n) {
  store_half_vector_n(p, narrow(a), n);
}

TESSERA_INLINE void store_u8(void* p, U32 a) {
  const __m128i x = narrow(a);
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(x, x));
}

TESSERA_INLINE F32 load(const F16* p) { return F32(_mm256_cvtph_ps(load_half_vector(p))); }
TESSERA_INLINE F32 load_n(const F16* p, std::int64_t n) {
  return F32(_mm256_cvtph_ps(load_half_vector_n(p, n)));
}
TESSERA_INLINE __m128i to_f16(F32 a) { return _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT); }
TESSERA_INLINE void store(F16* p, F32 a) { store_half_vector(p, to_f16(a)); }
TESSERA_INLINE void store_n(F16* p, F32 a, std::int64_t n) { store_half_vector_n(p, to_f16(a), n); }

// ---- e4m3 ----
/// fp16 has the bits of e4m3, with one more of exponent, whose bias is 8 more.
TESSERA_INLINE void e4m3_to_f16(const E4m3* p, F16* out) {
  const __m256i x = _mm256_cvtepi8_epi16(load_half_vector(p));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(-0x4080)));
}
/// Doubled bytes have lost their signs, and those of NaN are the largest.
class NanOfE4m3 {
 public:
  static constexpr int kBytes = kVectorBytes;
  TESSERA_INLINE void look_at(const E4m3* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    largest_ = _mm256_max_epu8(largest_, _mm256_add_epi8(x, x));
  }
  TESSERA_INLINE bool found() const {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest_, _mm256_set1_epi8(-2))) != 0;
  }

 private:
  __m256i largest_ = _mm256_setzero_si256();
};

// ---- range reduction of exp2 ----
/// Sets fraction = x - floor(x), for x clamped to [-127, 128] (NaN passes), and returns the factor
/// 2^floor(x), with 0 for 2^-127: an addition that leaves no room for fractions brings the exponent
/// field, floor(x) + 127, to the lowest bits.
TESSERA_INLINE F32 split_exp2(F32 x, F32& fraction) {
  const F32 clamped = max(F32(-127.0F), min(F32(128.0F), x));
  const F32 whole = F32(_mm256_floor_ps(clamped.v));
  fraction = clamped - whole;
  return f32_from_bits(bits(whole + F32(0x1.8p23F + 127.0F)) << 23);
}
TESSERA_INLINE F32 join_exp2(F32 y, F32 factor) { return y * factor; }

}  // namespace tessera::cpu::TESSERA_ISA
