// What simd_isa.cpp, compiled once per instruction set, offers simd_test.cpp: the SIMD vocabulary
// behind plain functions over arrays, so that no test code is compiled with an instruction set's
// flags.
#pragma once

#include <cstdint>

namespace tessera::cpu {

struct SimdProbe {
  const char* name;
  int lanes;
  int row_block;
  bool has_bf16_dot;

  // n elements each, any n: whole vectors, then a part of one.
  void (*exp2)(const float* x, float* y, std::int64_t n);
  void (*exp2_short)(const float* x, float* y, std::int64_t n);
  void (*log2)(const float* x, float* y, std::int64_t n);
  void (*tanh)(const float* x, float* y, std::int64_t n);
  void (*widen_bf16)(const std::uint16_t* x, float* y, std::int64_t n);
  void (*narrow_bf16)(const float* x, std::uint16_t* y, std::int64_t n);
  void (*widen_f16)(const std::uint16_t* x, float* y, std::int64_t n);
  void (*narrow_f16)(const float* x, std::uint16_t* y, std::int64_t n);
  void (*widen_e4m3)(const std::uint8_t* x, float* y, std::int64_t n);
  void (*widen_i8)(const std::int8_t* x, float* y, std::int64_t n);
  /// 2 * lanes elements to fp16 of a 256th of them. Null where fp16 has no instruction.
  void (*e4m3_to_f16)(const std::uint8_t* x, std::uint16_t* y);
  /// Whether n elements, a multiple of 4 * lanes, have a NaN. Null as before.
  bool (*nan_of_e4m3)(const std::uint8_t* x, std::int64_t n);
  /// 64 bytes to bf16, in the order of WidenBytes: e4m3, or i8. Null without has_bf16_dot.
  void (*bytes_to_bf16)(bool e4m3, const std::uint8_t* x, std::uint16_t* y);
  void (*round_to_int)(const float* x, std::int32_t* y, std::int64_t n);
  void (*pair_bf16)(const float* low, const float* high, std::uint32_t* pair, std::int64_t n);
  void (*load_pairs)(const std::uint16_t* low, const std::uint16_t* high, std::uint32_t* pair,
                     std::int64_t n);  ///< high may be null
  void (*multiply)(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t* hi,
                   std::uint32_t* lo, std::int64_t n);
  /// First random word for counters (i, 1, 2, 3) and a key.
  void (*philox)(std::uint32_t key0, std::uint32_t key1, std::uint32_t* y, std::int64_t n);

  // One vector.
  /// Bit i of out[c]: lane i of comparison c: < <= > >= == != of a and b as f32, then < <= > >= ==
  /// as i32, then as u32 (16 words); from out[16] on: any, all of a < b.
  void (*compare)(const float* a, const float* b, std::uint32_t* out);
  /// y = select(a < b, a, b); z = fma, fms, fnma, min, max of (a, b[, c]), one after another.
  void (*arithmetic)(const float* a, const float* b, const float* c, float* y, float* z);
  void (*reduce)(const float* x, float* sum, float* maximum);

  // lanes x lanes.
  void (*transpose)(float* x);
  void (*sum_rows)(const float* x, float* y);

  /// c[rows][nv * lanes] += A * B, nv 1 or 2. columns: A(m, k) = a[k * stride + m], else
  /// a[m * stride + k]. The last `last_only` of the k count for the last vector only.
  void (*product_f32)(std::int64_t rows, std::int64_t k, int nv, bool columns,
                      std::int64_t last_only, const float* a, std::int64_t stride, const float* b,
                      float* c);
  /// columns: `a` holds pairs. Null without has_bf16_dot.
  void (*product_bf16)(std::int64_t rows, std::int64_t k, int nv, bool columns,
                       std::int64_t last_only, const void* a, std::int64_t stride,
                       const std::uint32_t* b, float* c);

  double (*f32_burst)(std::int64_t iterations);
  double (*bf16_burst)(std::int64_t iterations);
};

namespace portable {
SimdProbe simd_probe();
}
namespace avx2 {
SimdProbe simd_probe();
}
namespace avx512 {
SimdProbe simd_probe();
}
namespace avx512_bf16 {
SimdProbe simd_probe();
}

}  // namespace tessera::cpu
