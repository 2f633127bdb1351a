// The SIMD vocabulary (simd.h) for AVX-512 F, BW, DQ, VL, and on top of it for the bf16 dot product
// and VBMI. Included by simd.h only.
#pragma once

namespace tessera::cpu::TESSERA_ISA {

TESSERA_INLINE F32::F32(float x) : v(_mm512_set1_ps(x)) {}
TESSERA_INLINE I32::I32(std::int32_t x) : v((NativeVector<std::int32_t>)_mm512_set1_epi32(x)) {}
TESSERA_INLINE U32::U32(std::uint32_t x)
    : v((NativeVector<std::uint32_t>)_mm512_set1_epi32(static_cast<int>(x))) {}

// Intel's integer vector type, to and from.
TESSERA_INLINE __m512i native(U32 a) { return (__m512i)a.v; }
TESSERA_INLINE __m512i native(I32 a) { return (__m512i)a.v; }
TESSERA_INLINE U32 u32(__m512i a) { return U32((NativeVector<std::uint32_t>)a); }
TESSERA_INLINE I32 i32(__m512i a) { return I32((NativeVector<std::int32_t>)a); }

// ---- masks ----
struct Mask {
  __mmask16 v;
};
TESSERA_INLINE Mask mask16(unsigned bits) { return {static_cast<__mmask16>(bits)}; }
TESSERA_INLINE Mask operator&(Mask a, Mask b) { return mask16(unsigned{a.v} & b.v); }
TESSERA_INLINE Mask operator|(Mask a, Mask b) { return mask16(unsigned{a.v} | b.v); }
TESSERA_INLINE Mask operator^(Mask a, Mask b) { return mask16(unsigned{a.v} ^ b.v); }
TESSERA_INLINE Mask operator~(Mask a) { return mask16(~unsigned{a.v}); }
TESSERA_INLINE std::uint32_t to_bits(Mask a) { return a.v; }
TESSERA_INLINE bool any(Mask a) { return a.v != 0; }
TESSERA_INLINE bool all(Mask a) { return a.v == 0xFFFF; }
TESSERA_INLINE Mask first_lanes(std::int64_t n) {
  return mask16(n >= 16 ? 0xFFFFU : n <= 0 ? 0U : (1U << n) - 1U);
}

TESSERA_INLINE Mask operator<(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
TESSERA_INLINE Mask operator<=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
TESSERA_INLINE Mask operator>(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
TESSERA_INLINE Mask operator>=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
TESSERA_INLINE Mask operator==(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
TESSERA_INLINE Mask operator!=(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
TESSERA_INLINE Mask operator<(I32 a, I32 b) {
  return {_mm512_cmplt_epi32_mask(native(a), native(b))};
}
TESSERA_INLINE Mask operator<=(I32 a, I32 b) {
  return {_mm512_cmple_epi32_mask(native(a), native(b))};
}
TESSERA_INLINE Mask operator>(I32 a, I32 b) { return b < a; }
TESSERA_INLINE Mask operator>=(I32 a, I32 b) { return b <= a; }
TESSERA_INLINE Mask operator==(I32 a, I32 b) {
  return {_mm512_cmpeq_epi32_mask(native(a), native(b))};
}
TESSERA_INLINE Mask operator<(U32 a, U32 b) {
  return {_mm512_cmplt_epu32_mask(native(a), native(b))};
}
TESSERA_INLINE Mask operator<=(U32 a, U32 b) {
  return {_mm512_cmple_epu32_mask(native(a), native(b))};
}
TESSERA_INLINE Mask operator>(U32 a, U32 b) { return b < a; }
TESSERA_INLINE Mask operator>=(U32 a, U32 b) { return b <= a; }
TESSERA_INLINE Mask operator==(U32 a, U32 b) {
  return {_mm512_cmpeq_epi32_mask(native(a), native(b))};
}

TESSERA_INLINE F32 select(Mask m, F32 a, F32 b) { return F32(_mm512_mask_blend_ps(m.v, b.v, a.v)); }
TESSERA_INLINE U32 select(Mask m, U32 a, U32 b) {
  return u32(_mm512_mask_blend_epi32(m.v, native(b), native(a)));
}
TESSERA_INLINE I32 select(Mask m, I32 a, I32 b) {
  return i32(_mm512_mask_blend_epi32(m.v, native(b), native(a)));
}

// ---- arithmetic ----
TESSERA_INLINE I32 iota() {
  return i32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
TESSERA_INLINE F32 fma(F32 a, F32 b, F32 c) { return F32(_mm512_fmadd_ps(a.v, b.v, c.v)); }
TESSERA_INLINE F32 fms(F32 a, F32 b, F32 c) { return F32(_mm512_fmsub_ps(a.v, b.v, c.v)); }
TESSERA_INLINE F32 fnma(F32 a, F32 b, F32 c) { return F32(_mm512_fnmadd_ps(a.v, b.v, c.v)); }
TESSERA_INLINE F32 fused(F32 a, F32 b, F32 c) { return fma(a, b, c); }
TESSERA_INLINE F32 max(F32 a, F32 b) { return F32(_mm512_max_ps(a.v, b.v)); }
TESSERA_INLINE F32 min(F32 a, F32 b) { return F32(_mm512_min_ps(a.v, b.v)); }
TESSERA_INLINE F32 to_f32(I32 a) { return F32(_mm512_cvtepi32_ps(native(a))); }
TESSERA_INLINE I32 round_to_i32(F32 a) { return i32(_mm512_cvtps_epi32(a.v)); }

TESSERA_INLINE U32 operator*(U32 a, U32 b) { return u32(_mm512_mullo_epi32(native(a), native(b))); }
TESSERA_INLINE void mul_hi_lo(U32 a, U32 b, U32& hi, U32& lo) {
  const __m512i even = _mm512_mul_epu32(native(a), native(b));
  const __m512i odd =
      _mm512_mul_epu32(_mm512_srli_epi64(native(a), 32), _mm512_srli_epi64(native(b), 32));
  hi = u32(_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd));
  lo = u32(_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32)));
}

// ---- across lanes ----
TESSERA_INLINE float reduce_add(F32 a) {
  const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
TESSERA_INLINE float reduce_max(F32 a) {
  const __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

TESSERA_INLINE __m512 unpack_low_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
TESSERA_INLINE __m512 unpack_high_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

TESSERA_INLINE F32 sum_rows(const F32 (&rows)[kLanes]) {
  __m512 pair[8], quad[4], half[2];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    const __m512 a = rows[i].v, b = rows[i + 1].v;
    pair[i / 2] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    const __m512 a = pair[i], b = pair[i + 1];
    quad[i / 2] = _mm512_add_ps(unpack_low_pairs(a, b), unpack_high_pairs(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    const __m512 a = quad[i], b = quad[i + 1];
    half[i / 2] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  return F32(_mm512_add_ps(_mm512_shuffle_f32x4(half[0], half[1], 0x88),
                           _mm512_shuffle_f32x4(half[0], half[1], 0xDD)));
}

TESSERA_INLINE void transpose(F32 (&rows)[kLanes]) {
  __m512 a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  // b[r + c]: columns c, c+4, c+8, c+12 of rows r .. r+3, one per 128-bit lane.
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4) {
    b[r] = unpack_low_pairs(a[r], a[r + 2]);
    b[r + 1] = unpack_high_pairs(a[r], a[r + 2]);
    b[r + 2] = unpack_low_pairs(a[r + 1], a[r + 3]);
    b[r + 3] = unpack_high_pairs(a[r + 1], a[r + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 top_even = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const __m512 top_odd = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xDD);
    const __m512 bottom_even = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 bottom_odd = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xDD);
    rows[c] = F32(_mm512_shuffle_f32x4(top_even, bottom_even, 0x88));
    rows[4 + c] = F32(_mm512_shuffle_f32x4(top_odd, bottom_odd, 0x88));
    rows[8 + c] = F32(_mm512_shuffle_f32x4(top_even, bottom_even, 0xDD));
    rows[12 + c] = F32(_mm512_shuffle_f32x4(top_odd, bottom_odd, 0xDD));
  }
}

// ---- parts of vectors ----
TESSERA_INLINE F32 load_n(const float* p, std::int64_t n) {
  return F32(_mm512_maskz_loadu_ps(first_lanes(n).v, p));
}
TESSERA_INLINE U32 load_n(const std::uint32_t* p, std::int64_t n) {
  return u32(_mm512_maskz_loadu_epi32(first_lanes(n).v, p));
}
TESSERA_INLINE I32 load_n(const std::int32_t* p, std::int64_t n) {
  return i32(_mm512_maskz_loadu_epi32(first_lanes(n).v, p));
}
TESSERA_INLINE void store_n(float* p, F32 a, std::int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n).v, a.v);
}
TESSERA_INLINE void store_n(std::uint32_t* p, U32 a, std::int64_t n) {
  _mm512_mask_storeu_epi32(p, first_lanes(n).v, native(a));
}
TESSERA_INLINE void store_n(std::int32_t* p, I32 a, std::int64_t n) {
  _mm512_mask_storeu_epi32(p, first_lanes(n).v, native(a));
}

// ---- 16-bit elements ----
TESSERA_INLINE __m256i load_half_vector(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
TESSERA_INLINE __m256i load_half_vector_n(const void* p, std::int64_t n) {
  return _mm256_maskz_loadu_epi16(first_lanes(n).v, p);
}
TESSERA_INLINE void store_half_vector(void* p, __m256i a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a);
}
TESSERA_INLINE void store_half_vector_n(void* p, __m256i a, std::int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n).v, a);
}
TESSERA_INLINE U32 load_u8(const void* p) {
  return u32(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
TESSERA_INLINE I32 load_i8(const void* p) {
  return i32(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
TESSERA_INLINE U32 load_u16(const void* p) {
  return u32(_mm512_cvtepu16_epi32(load_half_vector(p)));
}
TESSERA_INLINE U32 load_u16_n(const void* p, std::int64_t n) {
  return u32(_mm512_cvtepu16_epi32(load_half_vector_n(p, n)));
}
TESSERA_INLINE void store_u16(void* p, U32 a) {
  store_half_vector(p, _mm512_cvtepi32_epi16(native(a)));
}
TESSERA_INLINE void store_u16_n(void* p, U32 a, std::int64_t n) {
  store_half_vector_n(p, _mm512_cvtepi32_epi16(native(a)), n);
}

TESSERA_INLINE void store_u8(void* p, U32 a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(native(a)));
}

TESSERA_INLINE F32 load(const F16* p) { return F32(_mm512_cvtph_ps(load_half_vector(p))); }
TESSERA_INLINE F32 load_n(const F16* p, std::int64_t n) {
  return F32(_mm512_cvtph_ps(load_half_vector_n(p, n)));
}
TESSERA_INLINE __m256i to_f16(F32 a) {
  return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TESSERA_INLINE void store(F16* p, F32 a) { store_half_vector(p, to_f16(a)); }
TESSERA_INLINE void store_n(F16* p, F32 a, std::int64_t n) { store_half_vector_n(p, to_f16(a), n); }

#if TESSERA_ISA_CODE == 3
// These conversions flush f32 denormals to zero.
TESSERA_INLINE void store(Bf16* p, F32 a) {
  store_half_vector(p, (__m256i)_mm512_cvtneps_pbh(a.v));
}
TESSERA_INLINE void store_n(Bf16* p, F32 a, std::int64_t n) {
  store_half_vector_n(p, (__m256i)_mm512_cvtneps_pbh(a.v), n);
}
TESSERA_INLINE U32 pair_bf16(F32 a, F32 b) {
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return u32(_mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)));
}

/// Pairs of 2 * kLanes elements.
TESSERA_INLINE void load_pairs(const Bf16* row0, const Bf16* row1, U32& first, U32& second) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __m512i a = _mm512_loadu_si512(row0), b = _mm512_loadu_si512(row1);
  first = u32(_mm512_permutex2var_epi16(a, low, b));
  second = u32(_mm512_permutex2var_epi16(a, high, b));
}

/// c + a.low * b.low + a.high * b.high in every lane; bf16 denormals count as zero.
TESSERA_INLINE F32 dot_bf16(F32 c, U32 a, U32 b) {
  return F32(_mm512_dpbf16_ps(c.v, (__m512bh)native(a), (__m512bh)native(b)));
}
#endif

// ---- e4m3 ----
/// fp16 has the bits of e4m3, with one more of exponent, whose bias is 8 more.
TESSERA_INLINE void e4m3_to_f16(const E4m3* p, F16* out) {
  const __m512i x = _mm512_cvtepi8_epi16(load_half_vector(p));
  _mm512_storeu_si512(out, _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16(-0x4080)));
}
/// Doubled bytes have lost their signs, and those of NaN are the largest.
class NanOfE4m3 {
 public:
  static constexpr int kBytes = kVectorBytes;
  TESSERA_INLINE void look_at(const E4m3* p) {
    const __m512i x = _mm512_loadu_si512(p);
    largest_ = _mm512_max_epu8(largest_, _mm512_add_epi8(x, x));
  }
  TESSERA_INLINE bool found() const {
    return _mm512_cmpeq_epi8_mask(largest_, _mm512_set1_epi8(-2)) != 0;
  }

 private:
  __m512i largest_ = _mm512_setzero_si512();
};

// ---- range reduction of exp2 ----
/// Sets fraction = x - floor(x) and returns what join_exp2 needs. One VREDUCEPS would do, but on
/// Zen 5 it waits for the old value of its destination: with g++ 12's registers that made exp2 8
/// times slower.
TESSERA_INLINE F32 split_exp2(F32 x, F32& fraction) {
  fraction = x - F32(_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  return x;
}
/// y * 2^floor(x); 0 where the result would be denormal. Unordered comparison: NaN goes through.
TESSERA_INLINE F32 join_exp2(F32 y, F32 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0F), _CMP_NLT_UQ);
  return F32(_mm512_maskz_scalef_ps(normal, y.v, x.v));
}

#if TESSERA_ISA_CODE == 3
// For decoding: vectors of pairs of bf16, as the dot product takes them.
TESSERA_INLINE U32 load_operand(U32, const Bf16* p) {
  return load(reinterpret_cast<const std::uint32_t*>(p));
}
TESSERA_INLINE U32 load_operand_n(U32, const Bf16* p, std::int64_t n) {
  return u32(_mm512_maskz_loadu_epi16(n >= 32 ? ~0U : (1U << n) - 1U, p));
}
/// Pairs (a, b) of the 16-bit elements of two rows. Column 8 l + c of the rows is in lane 4 l + c
/// of pairs[0] for c < 4, in lane 4 l + c - 4 of pairs[1] from there on.
TESSERA_INLINE void pair_rows_of_values(U32 a, U32 b, U32 (&pairs)[2]) {
  pairs[0] = u32(_mm512_unpacklo_epi16(native(a), native(b)));
  pairs[1] = u32(_mm512_unpackhi_epi16(native(a), native(b)));
}
/// Puts sums over such pairs into the order of the columns.
TESSERA_INLINE void order_columns(Bf16, float* o) {
  const __m512 a = _mm512_loadu_ps(o), b = _mm512_loadu_ps(o + kLanes);
  const __m512 low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xEE);
  _mm512_storeu_ps(o, _mm512_shuffle_f32x4(low, low, 0xD8));
  _mm512_storeu_ps(o + kLanes, _mm512_shuffle_f32x4(high, high, 0xD8));
}

// The same of bytes: 64 are a vector of 32-bit lanes until they are widened, exactly.
template <class T>
  requires(sizeof(T) == 1)
TESSERA_INLINE U32 load_operand(U32, const T* p) {
  return u32(_mm512_loadu_si512(p));
}
template <class T>
  requires(sizeof(T) == 1)
TESSERA_INLINE U32 load_operand_n(U32, const T* p, std::int64_t n) {
  return u32(_mm512_maskz_loadu_epi8(n >= 64 ? ~0ULL : (1ULL << n) - 1ULL, p));
}

/// The high and low bytes of the bf16 of what 7 bits say: magnitudes of e4m3, or of i8.
struct BytesOfBf16 {
  alignas(kVectorBytes) std::uint8_t high[128], low[128];
};
template <class T>
constexpr BytesOfBf16 make_bytes_of_bf16() {
  BytesOfBf16 bytes = {};
  for (int i = 0; i < 128; ++i) {
    float x = static_cast<float>(i);
    if (std::is_same_v<T, E4m3>) {
      const int fraction = i % 8, exponent = i / 8;
      x = static_cast<float>(exponent > 0 ? 8 + fraction : fraction) * 0x1p-9F;
      for (int e = 1; e < exponent; ++e) x *= 2.0F;
    }
    const bool nan = std::is_same_v<T, E4m3> && i == 127;
    const std::uint32_t bf16 = nan ? 0x7FC0U : std::bit_cast<std::uint32_t>(x) >> 16;
    bytes.high[i] = static_cast<std::uint8_t>(bf16 >> 8);
    bytes.low[i] = static_cast<std::uint8_t>(bf16);
  }
  return bytes;
}
template <class T>
inline constexpr BytesOfBf16 kBytesOfBf16 = make_bytes_of_bf16<T>();

/// Makes bf16 of 64 bytes: of each 16 the first 8 into one vector, the others into another.
template <class T>
class WidenBytes {
 public:
  TESSERA_INLINE void operator()(U32 x, U32& first, U32& second) const {
    const __m512i bytes = native(x), top = _mm512_set1_epi8(-128);
    const __m512i size = std::is_same_v<T, I8> ? _mm512_abs_epi8(bytes) : bytes;
    __m512i high = _mm512_permutex2var_epi8(high_[0], size, high_[1]);
    const __m512i low = _mm512_permutex2var_epi8(low_[0], size, low_[1]);
    if (std::is_same_v<T, I8>) {
      // Of 128 the tables see 0. Its bf16 is 0x4300: the low byte is that of 0.
      high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(bytes, top), _mm512_set1_epi8(0x43));
    }
    high = _mm512_ternarylogic_epi32(high, bytes, top, 0xF8);  // with the sign
    first = u32(_mm512_unpacklo_epi8(low, high));
    second = u32(_mm512_unpackhi_epi8(low, high));
  }
  /// Pairs (a, b) of the bytes of two rows. Column 16 l + 4 i + c is in lane 4 l + c of pairs[i].
  TESSERA_INLINE void pair(U32 a, U32 b, U32 (&pairs)[4]) const {
    (*this)(u32(_mm512_unpacklo_epi8(native(a), native(b))), pairs[0], pairs[1]);
    (*this)(u32(_mm512_unpackhi_epi8(native(a), native(b))), pairs[2], pairs[3]);
  }

 private:
  const __m512i high_[2] = {_mm512_load_si512(kBytesOfBf16<T>.high),
                            _mm512_load_si512(kBytesOfBf16<T>.high + kVectorBytes)};
  const __m512i low_[2] = {_mm512_load_si512(kBytesOfBf16<T>.low),
                           _mm512_load_si512(kBytesOfBf16<T>.low + kVectorBytes)};
};
/// Puts 64 columns of a query into that order: the first 8 of each 16, then the others.
TESSERA_INLINE void order_query(Bf16* q) {
  constexpr std::int64_t kHalf = std::int64_t{2} * kLanes;
  const __m512i a = _mm512_loadu_si512(q), b = _mm512_loadu_si512(q + kHalf);
  const __m512i even = _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0);
  const __m512i odd = _mm512_set_epi64(15, 14, 11, 10, 7, 6, 3, 2);
  _mm512_storeu_si512(q, _mm512_permutex2var_epi64(a, even, b));
  _mm512_storeu_si512(q + kHalf, _mm512_permutex2var_epi64(a, odd, b));
}
template <class T>
  requires(sizeof(T) == 1)
TESSERA_INLINE void order_columns(T, float* o) {
  constexpr std::int64_t kVector = kLanes;
  __m512 x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_ps(o + i * kVector);
  const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44),
               b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(x[0], x[1], 0xEE),
               d = _mm512_shuffle_f32x4(x[2], x[3], 0xEE);
  _mm512_storeu_ps(o, _mm512_shuffle_f32x4(a, b, 0x88));
  _mm512_storeu_ps(o + kVector, _mm512_shuffle_f32x4(a, b, 0xDD));
  _mm512_storeu_ps(o + 2 * kVector, _mm512_shuffle_f32x4(c, d, 0x88));
  _mm512_storeu_ps(o + 3 * kVector, _mm512_shuffle_f32x4(c, d, 0xDD));
}
#endif

}  // namespace tessera::cpu::TESSERA_ISA
