// The yardstick by mma.sync: products of registers and nothing else. `tessera bench` states kernels
// as a share of what these reach on the same GPU at the same moment.
#pragma once

#include "cuda/mma/peak_shape.h"
#include "cuda/ptx/mma.h"

namespace tessera::cuda::mma {

/// Of what is multiplied: Turing has no bf16.
inline constexpr Dtype kPeakType = __CUDA_ARCH__ < 800 ? Dtype::f16 : Dtype::bf16;

/// kPeakProducts products, `rounds` times, by each warp; the operands are noise of both signs, as
/// what a multiplication costs in power, and so in clock, depends on its bits.
__device__ __forceinline__ void multiply_peak(int rounds, float* never) {
  constexpr int kRows = 4, kColumns = kPeakProducts / kRows;
  std::uint32_t a[kRows][4], b[kColumns][2];
  const auto noise = [](std::uint32_t seed) {
    const std::uint32_t bits = (seed + threadIdx.x * 97U) * 2654435761U >> 3;
    return (bits & 0x807F807FU) | (0x3E803E80U + (bits >> 8 & 0x01800180U));
  };
#pragma unroll
  for (int i = 0; i < kRows * 4; ++i) a[i / 4][i % 4] = noise(i);
#pragma unroll
  for (int i = 0; i < kColumns * 2; ++i) b[i / 2][i % 2] = noise(64 + i);
  float d[kPeakProducts][4] = {};
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kPeakProducts; ++i) {
      const std::uint32_t* const column = b[i % kColumns];
      ptx::mma<kPeakType>(d[i], a[i / kColumns], column[0], column[1]);
    }
  }
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPeakProducts * 4; ++i) sum += d[i / 4][i % 4];
  if (sum == -1.0F) *never = sum;  // so that nothing is left out
}

}  // namespace tessera::cuda::mma
