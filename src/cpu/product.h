// The one matrix product of the CPU kernels: C[m][lane] = sum over k of A(m, k) * B[k][lane], with
// A broadcast one element (or one pair of bf16) at a time against vectors of B. Forward and
// backward run all their products through it; what becomes of a finished row of C (store, running
// maximum, addition to an accumulator, dS) is the caller's functor, called while the row is still
// in registers.
#pragma once

#include "cpu/simd.h"

namespace tessera::cpu::TESSERA_ISA {

// ---- A: two ways to walk memory, strides in elements. One step takes one k, or a pair of bf16.
// ----

/// A(m, k) = data[m * stride + k]: rows as they lie in a tensor.
template <class T>
struct Rows {
  const T* data;
  std::int64_t stride;

  static constexpr bool kHalfStep = false;
  TESSERA_INLINE Rows from(std::int64_t m) const { return {data + m * stride, stride}; }
  TESSERA_INLINE static std::int64_t steps(std::int64_t k) { return k; }
  TESSERA_INLINE auto at(int m, std::int64_t step) const { return F32(data[m * stride + step]); }
};

/// Pairs (2 step, 2 step + 1), of any alignment. An odd k ends with half a pair: rows may end
/// there, so the missing element is not read but 0.
template <>
struct Rows<Bf16> {
  const Bf16* data;
  std::int64_t stride;

  static constexpr bool kHalfStep = true;
  TESSERA_INLINE Rows from(std::int64_t m) const { return {data + m * stride, stride}; }
  TESSERA_INLINE static std::int64_t steps(std::int64_t k) { return k / 2; }
  TESSERA_INLINE U32 at(int m, std::int64_t step) const {
    std::uint32_t pair = 0;
    __builtin_memcpy(&pair, data + m * stride + 2 * step, sizeof pair);
    return U32(pair);
  }
  TESSERA_INLINE U32 half_at(int m, std::int64_t step) const {
    return U32(std::uint32_t{data[m * stride + 2 * step].bits});
  }
};

/// A(m, k) = data[k * stride + m]: the transpose of rows.
template <class T>
struct Columns {
  const T* data;
  std::int64_t stride;

  static constexpr bool kHalfStep = false;
  TESSERA_INLINE Columns from(std::int64_t m) const { return {data + m, stride}; }
  TESSERA_INLINE static std::int64_t steps(std::int64_t k) { return k; }
  TESSERA_INLINE auto at(int m, std::int64_t step) const { return F32(data[step * stride + m]); }
};

/// bf16 pairs (2 step, 2 step + 1) interleaved beforehand (load_pairs), the missing one of an odd k
/// 0.
template <>
struct Columns<std::uint32_t> {
  const std::uint32_t* data;
  std::int64_t stride;

  static constexpr bool kHalfStep = false;
  TESSERA_INLINE Columns from(std::int64_t m) const { return {data + m, stride}; }
  TESSERA_INLINE static std::int64_t steps(std::int64_t k) { return (k + 1) / 2; }
  TESSERA_INLINE U32 at(int m, std::int64_t step) const { return U32(data[step * stride + m]); }
};

// ---- the kernel ----

/// Vector registers.
#if TESSERA_ISA_CODE >= 2 || defined(__aarch64__)
inline constexpr int kRegisters = 32;
#else
inline constexpr int kRegisters = 16;
#endif
/// Rows of C in registers at once: kRowBlock * kNV accumulators, kNV vectors of B and one
/// broadcast.
inline constexpr int kRowBlock = kRegisters == 32 ? 8 : 6;

TESSERA_INLINE F32 multiply_add(F32 a, F32 b, F32 c) { return fma(a, b, c); }
#if TESSERA_ISA_CODE == 3
TESSERA_INLINE F32 multiply_add(U32 a, U32 b, F32 c) { return dot_bf16(c, a, b); }
#endif

/// C += A(:, step) * B[step] for the vectors of lanes from kFirst on; each broadcast is made once
/// and used for all of them.
template <bool kHalf, int kFirst = 0, int MR, int NV, class A, class B>
TESSERA_INLINE void multiply_step(F32 (&c)[MR][NV], const A& a, std::int64_t step, const B* b) {
  decltype(load(b)) vectors[NV];
#pragma GCC unroll 8
  for (int n = kFirst; n < NV; ++n) vectors[n] = load(b + n * kLanes);
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
    decltype(load(b)) element;
    if constexpr (kHalf) {
      element = a.half_at(m, step);
    } else {
      element = a.at(m, step);
    }
#pragma GCC unroll 8
    for (int n = kFirst; n < NV; ++n) c[m][n] = multiply_add(element, vectors[n], c[m][n]);
  }
}

/// MR rows of C, from row m on.
template <int MR, int NV, class A, class B, class Epilogue>
TESSERA_INLINE void product_block(std::int64_t m, std::int64_t k, A a, const B* b,
                                  std::int64_t b_stride, Epilogue& epilogue,
                                  std::int64_t last_only = 0) {
  F32 c[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) c[i][n] = F32{};
  }
  a = a.from(m);
  const std::int64_t steps = A::steps(k - last_only);
  std::int64_t step = 0;
  if constexpr (requires { epilogue.pieces(); }) {
    const int pieces = epilogue.pieces();
    const std::int64_t share = pieces > 0 ? steps / pieces : 0;
    for (int piece = 0; piece < pieces; ++piece) {
      epilogue.piece(piece);
      const std::int64_t end = step + share;
#pragma GCC unroll 4
      for (; step < end; ++step) multiply_step<false>(c, a, step, b + step * b_stride);
    }
  }
#pragma GCC unroll 4
  for (; step < steps; ++step) multiply_step<false>(c, a, step, b + step * b_stride);
  if (last_only > 0) {
    const std::int64_t end = A::steps(k);
#pragma GCC unroll 2
    for (; step < end; ++step) multiply_step<false, NV - 1>(c, a, step, b + step * b_stride);
  }
  if constexpr (A::kHalfStep) {
    if ((k & 1) != 0) multiply_step<true>(c, a, steps, b + steps * b_stride);
  }
  if constexpr (requires { epilogue.block(m, c); }) {
    epilogue.block(m, c);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) epilogue(m + i, c[i]);
  }
}

/// The same for 1 or any even number of `rows` up to MR.
template <int MR, int NV, class A, class B, class Epilogue>
TESSERA_INLINE void product_rows(int rows, std::int64_t m, std::int64_t k, const A& a, const B* b,
                                 std::int64_t b_stride, Epilogue& epilogue,
                                 std::int64_t last_only) {
  if (rows == MR) {
    product_block<MR, NV>(m, k, a, b, b_stride, epilogue, last_only);
  } else if constexpr (MR > 1) {
    product_rows<MR == 2 ? 1 : MR - 2, NV>(rows, m, k, a, b, b_stride, epilogue, last_only);
  }
}

/// Rows of the next block if `left` are left. The last block and a bit are split evenly: a block of
/// few rows would wait for its own additions. An odd row comes alone, as every number of rows is
/// code of its own.
TESSERA_INLINE int rows_at_once(std::int64_t left) {
  if (left == kRowBlock || left >= std::int64_t{2} * kRowBlock) return kRowBlock;
  const int rest = static_cast<int>(left);
  return rest > kRowBlock ? (rest + 3) / 4 * 2 : rest > 1 ? rest / 2 * 2 : rest;
}

/// Calls epilogue(m, c) for every m in [0, rows), in order, with c (F32[NV], may be changed) = row
/// m of A * B, or where the functor has it, epilogue.block(m, c) with c (F32[MR][NV]) = rows [m, m
/// + MR); every block but the last starts and ends at an even row. Any rows and k >= 0; k = 0 gives
/// zeros. k counts elements, also for bf16. B: k rows of NV * kLanes floats, b_stride apart; for
/// bf16 (k + 1) / 2 rows of pairs (pair_bf16, load_pairs), where the second half of an odd last
/// pair must be finite. The last `last_only` of the k count for the last vector of lanes alone, as
/// if B were 0 in the others; they start at an even k, and A is Columns.
template <int NV = kNV, class A, class B, class Epilogue>
TESSERA_INLINE void product(std::int64_t rows, std::int64_t k, const A& a, const B* b,
                            std::int64_t b_stride, Epilogue&& epilogue,
                            std::int64_t last_only = 0) {
  int block = 0;
  for (std::int64_t m = 0; m < rows; m += block) {
    block = rows_at_once(rows - m);
    product_rows<kRowBlock, NV>(block, m, k, a, b, b_stride, epilogue, last_only);
  }
}

}  // namespace tessera::cpu::TESSERA_ISA
