// Copies that change the shape of a tile: rows of a tensor into lanes (queries side by side) and
// back, 16-bit rows into fp32, neighbouring bf16 rows into pairs. Every access stays inside the
// rows given.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/kernel.h"
#include "cpu/simd.h"
#include "tessera/types.hpp"

namespace tessera::cpu::TESSERA_ISA {

/// Calls body(T{}) with the storage type of dtype, which is not one of 8 bits.
template <class Body>
TESSERA_INLINE void with_storage(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::f32: return body(float{});
    case Dtype::bf16: return body(Bf16{});
    case Dtype::f16: return body(F16{});
    case Dtype::e4m3:
    case Dtype::i8: return;  // plan() refuses them
  }
}

/// The same for any type.
template <class Body>
TESSERA_INLINE void with_any_storage(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::e4m3: return body(E4m3{});
    case Dtype::i8: return body(I8{});
    default: with_storage(dtype, body);
  }
}

/// The same for the tensors of a kernel: bf16 operands come from tensors of bf16.
template <core::Kernel K, class Body>
TESSERA_INLINE void with_tensor_storage(Dtype dtype, const Body& body) {
  if constexpr (K.operand == core::Operand::bf16) {
    body(Bf16{});
  } else {
    with_storage(dtype, body);
  }
}

/// What a forward of tiles reads: of any type where rows multiply fp32.
template <core::Kernel K, class Body>
TESSERA_INLINE void with_widened_storage(Dtype dtype, const Body& body) {
  if constexpr (K.operand == core::Operand::bf16) {
    body(Bf16{});
  } else {
    with_any_storage(dtype, body);
  }
}

/// Asks for a row, into the second-level cache.
template <Access kAccess>
TESSERA_INLINE void prefetch_row(const std::byte* row, std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  const auto into_line = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % kLine);
  for (std::int64_t i = -into_line; i < bytes; i += kLine) {
    prefetch<2, kAccess>(row + i);
  }
}

/// out[j * stride + i] = row[i][j] * factors[i] for j < n: kLanes rows become the lanes of n
/// vectors.
template <class T>
TESSERA_INLINE void rows_to_vectors(const T* const* row, std::int64_t n, F32 factors, float* out,
                                    std::int64_t stride) {
  for (std::int64_t j = 0; j < n; j += kLanes) {
    F32 x[kLanes];
    const std::int64_t count = n - j < kLanes ? n - j : kLanes;
    if (count == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) x[i] = load(row[i] + j);
    } else {
      for (int i = 0; i < kLanes; ++i) x[i] = load_n(row[i] + j, count);
    }
    transpose(x);
    float* target = out + j * stride;
    for (std::int64_t i = 0; i < count; ++i) store(target + i * stride, x[i] * factors);
  }
}

/// out[j][i] = row[i][j] * factor for j < n, of kTile rows.
template <class T>
[[gnu::noinline]] void rows_to_lanes(const T* const (&row)[kTile], std::int64_t n, float factor,
                                     float* out) {
  for (int first = 0; first < kTile; first += kLanes) {
    rows_to_vectors(row + first, n, F32(factor), out + first, kTile);
  }
}

/// The same with a factor for every row.
template <class T>
[[gnu::noinline]] void rows_to_lanes(const T* const (&row)[kTile], std::int64_t n,
                                     const float (&factor)[kTile], float* out) {
  for (int first = 0; first < kTile; first += kLanes) {
    rows_to_vectors(row + first, n, load(factor + first), out + first, kTile);
  }
}

/// The same for pairs: out[j][i] = (row[i][2j], row[i][2j+1]), 2j < n; past an odd end comes a
/// zero.
[[gnu::noinline]] inline void rows_to_lane_pairs(const Bf16* const (&row)[kTile], std::int64_t n,
                                                 std::uint32_t* out) {
  for (int first = 0; first < kTile; first += kLanes) {
    for (std::int64_t j = 0; j < n; j += 2 * kLanes) {
      U32 x[kLanes];
      const std::int64_t left = n - j < 2 * kLanes ? n - j : 2 * kLanes;
      if (left == 2 * kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          __builtin_memcpy(&x[i].v, row[first + i] + j, sizeof x[i].v);  // of any alignment
        }
      } else {
        for (int i = 0; i < kLanes; ++i) {
          std::uint32_t pairs[kLanes] = {};
          __builtin_memcpy(pairs, row[first + i] + j, static_cast<std::size_t>(2 * left));
          x[i] = load(pairs);
        }
      }
      transpose(x);
      std::uint32_t* target = out + j / 2 * kTile + first;
      for (std::int64_t i = 0; i < (left + 1) / 2; ++i) store(target + i * kTile, x[i]);
    }
  }
}

/// row[i][j] = in[j][i] * factor[i] for j < n and i < count: the way back, rounded to T.
template <class T>
[[gnu::noinline]] void lanes_to_rows(const float* in, std::int64_t n, const float* factor,
                                     int count, T* const (&row)[kTile]) {
  for (int first = 0; first < count; first += kLanes) {
    const F32 f = load(factor + first);
    const int rows = count - first < kLanes ? count - first : kLanes;
    for (std::int64_t j = 0; j < n; j += kLanes) {
      const std::int64_t left = n - j < kLanes ? n - j : kLanes;
      F32 x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = i < left ? load(in + (j + i) * kTile + first) * f : F32{};
      }
      transpose(x);
      for (int i = 0; i < rows; ++i) {
        if (left == kLanes) {
          store(row[first + i] + j, x[i]);
        } else {
          store_n(row[first + i] + j, x[i], left);
        }
      }
    }
  }
}

/// out[r][j] = in[r][j] in fp32.
template <class T>
TESSERA_INLINE void widen_rows(const T* in, std::int64_t in_stride, std::int64_t rows,
                               std::int64_t n, float* out, std::int64_t out_stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* source = in + r * in_stride;
    float* target = out + r * out_stride;
    std::int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store(target + j, load(source + j));
    if (j < n) store_n(target + j, load_n(source + j, n - j), n - j);
  }
}

/// row[j] = row[j] * factor[j or 0] + shift[j]; shift: may be null.
TESSERA_INLINE void scale_row(float* row, std::int64_t n, const float* factor, bool by_column,
                              const float* shift) {
  for (std::int64_t j = 0; j < n; j += kLanes) {
    const std::int64_t left = n - j < kLanes ? n - j : kLanes;
    const F32 f = by_column ? load_n(factor + j, left) : F32(*factor);
    const F32 x = load_n(row + j, left) * f;
    store_n(row + j, shift != nullptr ? x + load_n(shift + j, left) : x, left);
  }
}

/// out[r][j] = in[r][j].
TESSERA_INLINE void copy_rows(const Bf16* in, std::int64_t in_stride, std::int64_t rows,
                              std::int64_t n, Bf16* out, std::int64_t out_stride) {
  constexpr std::int64_t kStep = 2 * kLanes;
  for (std::int64_t r = 0; r < rows; ++r) {
    const Bf16* source = in + r * in_stride;
    Bf16* target = out + r * out_stride;
    std::int64_t j = 0;
    for (; j + kStep <= n; j += kStep) __builtin_memcpy(target + j, source + j, 2 * kStep);
    if (j < n) __builtin_memcpy(target + j, source + j, static_cast<std::size_t>(2 * (n - j)));
  }
}

/// out[r/2][j] = (in[r][j], in[r+1][j]) for even r; past an odd end comes a row of zeros.
[[gnu::noinline]] inline void pair_rows(const Bf16* in, std::int64_t in_stride, std::int64_t rows,
                                        std::int64_t n, std::uint32_t* out,
                                        std::int64_t out_stride) {
  for (std::int64_t r = 0; r < rows; r += 2) {
    const Bf16* low = in + r * in_stride;
    const bool pair = r + 1 < rows;
    const Bf16* high = pair ? low + in_stride : low;
    std::uint32_t* target = out + r / 2 * out_stride;
    std::int64_t j = 0;
#if TESSERA_ISA_CODE == 3
    for (; pair && j + 2 * kLanes <= n; j += 2 * kLanes) {
      U32 first, second;
      load_pairs(low + j, high + j, first, second);
      store(target + j, first);
      store(target + j + kLanes, second);
    }
#endif
    for (; j < n; j += kLanes) {
      const std::int64_t left = n - j < kLanes ? n - j : kLanes;
      if (pair) {
        store_n(target + j, load_pairs_n(low + j, high + j, left), left);
      } else {
        store_n(target + j, load_pairs_n(low + j, left), left);
      }
    }
  }
}

}  // namespace tessera::cpu::TESSERA_ISA
