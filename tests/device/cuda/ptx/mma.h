// cuda/ptx/mma.h for fibers: copies are there when they have been waited for.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"

namespace tessera::cuda::ptx {

using CachePolicy = std::uint64_t;
inline CachePolicy cache_policy(bool once) { return once ? 1 : 0; }
inline void copy_async(std::uint32_t to, const void* from, bool exists) {
  device::begin_copy({shared_memory(to), exists ? from : nullptr, 16});
}
inline void copy_async(std::uint32_t to, const void* from, bool exists, CachePolicy /*policy*/) {
  copy_async(to, from, exists);
}
inline void copy_async(std::uint32_t to, const void* from, CachePolicy /*policy*/) {
  copy_async(to, from, true);
}
inline void copy_async_word(std::uint32_t to, const void* from, bool exists) {
  device::begin_copy({shared_memory(to), exists ? from : nullptr, 4});
}
inline void copy_arrive(std::uint32_t barrier) {
  device::finish_copies(0, true);
  mbarrier_arrive(barrier);
}
inline void copy_commit() { device::end_group(); }
template <int kPending>
void copy_wait() {
  device::finish_copies(kPending, false);
}

/// Exactly, and rounded once.
template <Dtype kType>
void mma(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1) {
  // Words of A, then of B, two elements each.
  const std::uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  device::Shown mine = {};
  for (unsigned i = 0; i < 6; ++i) {
    const float pair[2] = {widen<kType>(static_cast<std::uint16_t>(words[i])),
                           widen<kType>(static_cast<std::uint16_t>(words[i] >> 16))};
    std::memcpy(&mine[i], pair, sizeof pair);
  }
  const auto* const row = device::show_warp(mine);
  const auto element = [&](unsigned lane, unsigned word, unsigned half) {
    float x;
    std::memcpy(&x, reinterpret_cast<const char*>(&row[lane][word]) + half * sizeof x, sizeof x);
    return static_cast<double>(x);
  };
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned m = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
    double sum = static_cast<double>(d[i]);
    for (unsigned k = 0; k < 16; ++k) {
      // Of A, words are (row half, column half); of B, halves of the columns.
      const unsigned pair = k % 8 / 2;
      const double x = element(m % 8 * 4 + pair, m / 8 + k / 8 * 2, k % 2);
      const double y = element(n * 4 + pair, 4 + k / 8, k % 2);
      sum += x * y;
    }
    d[i] = static_cast<float>(sum);
  }
}
inline void load_matrices_across(std::uint32_t* words, std::uint32_t from) {
  const auto* const row = device::show_warp({from});
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    std::uint16_t pair[2];
    for (unsigned j = 0; j < 2; ++j) {
      const auto line = static_cast<std::uint32_t>(row[8 * i + lane % 4 * 2 + j][0]);
      std::memcpy(pair + j, shared_memory(line + lane / 4 * 2), 2);
    }
    std::memcpy(words + i, pair, 4);
  }
}

}  // namespace tessera::cuda::ptx
