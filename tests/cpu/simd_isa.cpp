// The SIMD vocabulary of one instruction set behind plain functions; see simd_probe.h.
#include "core/philox.h"
#include "cpu/math.h"
#include "cpu/peak.h"
#include "cpu/product.h"
#include "cpu/simd_probe.h"

#define TESSERA_STRINGIZE2(x) #x
#define TESSERA_STRINGIZE(x) TESSERA_STRINGIZE2(x)

namespace tessera::cpu::TESSERA_ISA {
namespace {

/// Runs whole(i) for vectors and part(i, n) for what is left.
template <class Whole, class Part>
TESSERA_INLINE void for_vectors(std::int64_t n, const Whole& whole, const Part& part) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) whole(i);
  part(i, n - i);
}

template <class From, class To, class Function>
TESSERA_INLINE void map(const From* x, To* y, std::int64_t n, const Function& f) {
  for_vectors(
      n, [&](std::int64_t i) { store(y + i, f(load(x + i))); },
      [&](std::int64_t i, std::int64_t rest) { store_n(y + i, f(load_n(x + i, rest)), rest); });
}

const Bf16* as_bf16(const void* p) { return static_cast<const Bf16*>(p); }
Bf16* as_bf16(void* p) { return static_cast<Bf16*>(p); }

void probe_exp2(const float* x, float* y, std::int64_t n) {
  map(x, y, n, [](F32 v) { return exp2(v); });
}
void probe_exp2_short(const float* x, float* y, std::int64_t n) {
  map(x, y, n, [](F32 v) { return exp2_short(v); });
}
void probe_log2(const float* x, float* y, std::int64_t n) {
  map(x, y, n, [](F32 v) { return log2(v); });
}
void probe_tanh(const float* x, float* y, std::int64_t n) {
  map(x, y, n, [](F32 v) { return tanh(v); });
}
void probe_widen_bf16(const std::uint16_t* x, float* y, std::int64_t n) {
  map(as_bf16(x), y, n, [](F32 v) { return v; });
}
void probe_narrow_bf16(const float* x, std::uint16_t* y, std::int64_t n) {
  map(x, as_bf16(y), n, [](F32 v) { return v; });
}
void probe_widen_f16(const std::uint16_t* x, float* y, std::int64_t n) {
  map(reinterpret_cast<const F16*>(x), y, n, [](F32 v) { return v; });
}
void probe_narrow_f16(const float* x, std::uint16_t* y, std::int64_t n) {
  map(x, reinterpret_cast<F16*>(y), n, [](F32 v) { return v; });
}
void probe_widen_e4m3(const std::uint8_t* x, float* y, std::int64_t n) {
  map(reinterpret_cast<const E4m3*>(x), y, n, [](F32 v) { return v; });
}
void probe_widen_i8(const std::int8_t* x, float* y, std::int64_t n) {
  map(reinterpret_cast<const I8*>(x), y, n, [](F32 v) { return v; });
}
#if TESSERA_ISA_CODE >= 1
void probe_e4m3_to_f16(const std::uint8_t* x, std::uint16_t* y) {
  e4m3_to_f16(reinterpret_cast<const E4m3*>(x), reinterpret_cast<F16*>(y));
}
bool probe_nan_of_e4m3(const std::uint8_t* x, std::int64_t n) {
  NanOfE4m3 nan;
  for (std::int64_t i = 0; i < n; i += NanOfE4m3::kBytes) {
    nan.look_at(reinterpret_cast<const E4m3*>(x + i));
  }
  return nan.found();
}
#else
constexpr decltype(SimdProbe::e4m3_to_f16) probe_e4m3_to_f16 = nullptr;
constexpr decltype(SimdProbe::nan_of_e4m3) probe_nan_of_e4m3 = nullptr;
#endif
#if TESSERA_ISA_CODE == 3
void probe_bytes_to_bf16(bool e4m3, const std::uint8_t* x, std::uint16_t* y) {
  const U32 bytes = load(reinterpret_cast<const std::uint32_t*>(x));
  U32 first, second;
  if (e4m3) {
    WidenBytes<E4m3>()(bytes, first, second);
  } else {
    WidenBytes<I8>()(bytes, first, second);
  }
  store(reinterpret_cast<std::uint32_t*>(y), first);
  store(reinterpret_cast<std::uint32_t*>(y) + kLanes, second);
}
#else
constexpr decltype(SimdProbe::bytes_to_bf16) probe_bytes_to_bf16 = nullptr;
#endif
void probe_round_to_int(const float* x, std::int32_t* y, std::int64_t n) {
  map(x, y, n, [](F32 v) { return round_to_i32(v); });
}

void probe_pair_bf16(const float* low, const float* high, std::uint32_t* pair, std::int64_t n) {
  for_vectors(
      n, [&](std::int64_t i) { store(pair + i, pair_bf16(load(low + i), load(high + i))); },
      [&](std::int64_t i, std::int64_t rest) {
        store_n(pair + i, pair_bf16(load_n(low + i, rest), load_n(high + i, rest)), rest);
      });
}

void probe_load_pairs(const std::uint16_t* low, const std::uint16_t* high, std::uint32_t* pair,
                      std::int64_t n) {
  const Bf16* a = as_bf16(low);
  const Bf16* b = as_bf16(high);
  for_vectors(
      n,
      [&](std::int64_t i) {
        store(pair + i, b != nullptr ? load_pairs(a + i, b + i) : load_pairs_n(a + i, kLanes));
      },
      [&](std::int64_t i, std::int64_t rest) {
        store_n(pair + i,
                b != nullptr ? load_pairs_n(a + i, b + i, rest) : load_pairs_n(a + i, rest), rest);
      });
}

void probe_multiply(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t* hi,
                    std::uint32_t* lo, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const std::int64_t rest = n - i < kLanes ? n - i : kLanes;
    U32 h, l;
    mul_hi_lo(load_n(a + i, rest), load_n(b + i, rest), h, l);
    store_n(hi + i, h, rest);
    store_n(lo + i, l, rest);
  }
}

void probe_philox(std::uint32_t key0, std::uint32_t key1, std::uint32_t* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const U32 counter = bits(iota()) + U32(static_cast<std::uint32_t>(i));
    const auto random =
        core::philox4x32_10<U32>({{counter, U32(1U), U32(2U), U32(3U)}}, key0, key1);
    store_n(y + i, random.word[0], n - i < kLanes ? n - i : kLanes);
  }
}

void probe_compare(const float* a, const float* b, std::uint32_t* out) {
  const F32 x = load(a), y = load(b);
  const I32 i = i32_from_bits(bits(x)), j = i32_from_bits(bits(y));
  const U32 u = bits(x), v = bits(y);
  const Mask results[16] = {
      x<y, x <= y, x> y, x >= y, x == y, x != y, i<j, i <= j, i> j, i >= j, i == j,
      u<v, u <= v, u> v, u >= v, u == v};
  for (const Mask& m : results) *out++ = to_bits(m);
  *out++ = any(results[0]) ? 1 : 0;
  *out++ = all(results[0]) ? 1 : 0;
}

void probe_arithmetic(const float* a, const float* b, const float* c, float* y, float* z) {
  const F32 x1 = load(a), x2 = load(b), x3 = load(c);
  store(y, select(x1 < x2, x1, x2));
  store(z, fma(x1, x2, x3));
  store(z + kLanes, fms(x1, x2, x3));
  store(z + std::int64_t{2} * kLanes, fnma(x1, x2, x3));
  store(z + std::int64_t{3} * kLanes, min(x1, x2));
  store(z + std::int64_t{4} * kLanes, max(x1, x2));
}

void probe_reduce(const float* x, float* sum, float* maximum) {
  *sum = reduce_add(load(x));
  *maximum = reduce_max(load(x));
}

void probe_transpose(float* x) {
  F32 rows[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) rows[i] = load(x + i * kLanes);
  transpose(rows);
  for (std::int64_t i = 0; i < kLanes; ++i) store(x + i * kLanes, rows[i]);
}

void probe_sum_rows(const float* x, float* y) {
  F32 rows[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) rows[i] = load(x + i * kLanes);
  store(y, sum_rows(rows));
}

template <int NV, class A, class B>
void add_product(std::int64_t rows, std::int64_t k, std::int64_t last_only, const A& a, const B* b,
                 float* c) {
  const auto add = [&](std::int64_t m, const F32(&row)[NV]) {
    for (int n = 0; n < NV; ++n) {
      float* p = c + (m * NV + n) * kLanes;
      store(p, load(p) + row[n]);
    }
  };
  product<NV>(rows, k, a, b, NV * kLanes, add, last_only);
}

template <class A, class B>
void add_product(std::int64_t rows, std::int64_t k, int nv, std::int64_t last_only, const A& a,
                 const B* b, float* c) {
  nv == 1 ? add_product<1>(rows, k, last_only, a, b, c)
          : add_product<2>(rows, k, last_only, a, b, c);
}

void probe_product_f32(std::int64_t rows, std::int64_t k, int nv, bool columns,
                       std::int64_t last_only, const float* a, std::int64_t stride, const float* b,
                       float* c) {
  columns ? add_product(rows, k, nv, last_only, Columns<float>{a, stride}, b, c)
          : add_product(rows, k, nv, last_only, Rows<float>{a, stride}, b, c);
}

#if TESSERA_ISA_CODE == 3
void probe_product_bf16(std::int64_t rows, std::int64_t k, int nv, bool columns,
                        std::int64_t last_only, const void* a, std::int64_t stride,
                        const std::uint32_t* b, float* c) {
  columns ? add_product(rows, k, nv, last_only,
                        Columns<std::uint32_t>{static_cast<const std::uint32_t*>(a), stride}, b, c)
          : add_product(rows, k, nv, last_only, Rows<Bf16>{as_bf16(a), stride}, b, c);
}
#else
constexpr decltype(SimdProbe::product_bf16) probe_product_bf16 = nullptr;
#endif

}  // namespace

SimdProbe simd_probe() {
  return {
      .name = TESSERA_STRINGIZE(TESSERA_ISA),
      .lanes = kLanes,
      .row_block = kRowBlock,
      .has_bf16_dot = kHasBf16Dot,
      .exp2 = probe_exp2,
      .exp2_short = probe_exp2_short,
      .log2 = probe_log2,
      .tanh = probe_tanh,
      .widen_bf16 = probe_widen_bf16,
      .narrow_bf16 = probe_narrow_bf16,
      .widen_f16 = probe_widen_f16,
      .narrow_f16 = probe_narrow_f16,
      .widen_e4m3 = probe_widen_e4m3,
      .widen_i8 = probe_widen_i8,
      .e4m3_to_f16 = probe_e4m3_to_f16,
      .nan_of_e4m3 = probe_nan_of_e4m3,
      .bytes_to_bf16 = probe_bytes_to_bf16,
      .round_to_int = probe_round_to_int,
      .pair_bf16 = probe_pair_bf16,
      .load_pairs = probe_load_pairs,
      .multiply = probe_multiply,
      .philox = probe_philox,
      .compare = probe_compare,
      .arithmetic = probe_arithmetic,
      .reduce = probe_reduce,
      .transpose = probe_transpose,
      .sum_rows = probe_sum_rows,
      .product_f32 = probe_product_f32,
      .product_bf16 = probe_product_bf16,
      .f32_burst = f32_burst,
      .bf16_burst = bf16_burst,
  };
}

}  // namespace tessera::cpu::TESSERA_ISA
