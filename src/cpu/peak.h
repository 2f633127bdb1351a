// The yardstick: loops that do nothing but multiply and add in registers. `tessera bench` states
// kernels as a share of what these reach on the same core at the same moment.
#pragma once

#include "cpu/simd.h"

namespace tessera::cpu::TESSERA_ISA {

/// The accumulators that keep every unit of today's cores busy (2 a cycle, 4 cycles latency) and
/// fit the registers.
inline constexpr int kChains = TESSERA_ISA_CODE >= 2 ? 24 : 12;

/// Hides a value from the optimiser, in its register.
TESSERA_INLINE void keep(F32& a) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(a.v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(a.v));
#else
  asm volatile("" : "+m"(a.v));
#endif
}

template <class Operation>
TESSERA_INLINE void burst(std::int64_t iterations, const Operation& operation) {
  F32 chain[kChains];
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) chain[i] = F32{};
  for (std::int64_t round = 0; round < iterations; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) {
      chain[i] = operation(chain[i]);
      keep(chain[i]);
    }
  }
}

/// f32 multiply-add.
inline double f32_burst(std::int64_t iterations) {
  F32 a(0.5F), b(1.0F);
  keep(a);
  keep(b);
  burst(iterations, [&](F32 c) { return fma(a, c, b); });
  return 2.0 * kChains * kLanes * static_cast<double>(iterations);
}

/// bf16 dot product; 0 where the instruction set has none.
inline double bf16_burst(std::int64_t iterations) {
#if TESSERA_ISA_CODE == 3
  const U32 a(0x3F003F00U), b(0x3F003F00U);
  burst(iterations, [&](F32 c) { return dot_bf16(c, a, b); });
  return 4.0 * kChains * kLanes * static_cast<double>(iterations);
#else
  static_cast<void>(iterations);
  return 0.0;
#endif
}

/// Reads every byte once (less than 256 at the end), asking for each line 4 KiB ahead.
inline void read_sweep(const std::byte* data, std::int64_t bytes) {
  constexpr std::int64_t kStep = 256, kAhead = 4096;
  F32 sums[4] = {F32{}, F32{}, F32{}, F32{}};
  for (std::int64_t at = 0; at + kStep <= bytes; at += kStep) {
    for (std::int64_t line = 0; line < kStep; line += 64) prefetch(data + at + kAhead + line);
    const auto* values = reinterpret_cast<const float*>(data + at);
    constexpr std::int64_t kValues = kStep / 4;
    for (std::int64_t i = 0; i < kValues; i += kLanes) {
      F32& sum = sums[i / kLanes % 4];
      sum = sum + load(values + i);
    }
  }
  for (F32& sum : sums) keep(sum);
}

}  // namespace tessera::cpu::TESSERA_ISA
