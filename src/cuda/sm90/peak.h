// The yardstick on Hopper: wgmma on shared operands and nothing else. `tessera bench` states
// kernels as a share of what these reach on the same GPU at the same moment.
#pragma once

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/shape.h"
#include "cuda/tile/read_peak.h"

namespace tessera::cuda::sm90 {

/// (64 x 64) (64 x 256) in bf16, `rounds` times, by each of two warpgroups; the operands are noise
/// of both signs, as what a multiplication costs in power, and so in clock, depends on its bits.
__device__ __forceinline__ void multiply_peak(char* shared, int rounds, float* never) {
  char* const operands = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024;
  for (int i = static_cast<int>(threadIdx.x); i < kPeakBytes / 2; i += kPeakThreads) {
    const std::uint32_t noise = (static_cast<std::uint32_t>(i) * 2654435761U) >> 8;
    reinterpret_cast<std::uint16_t*>(operands)[i] =
        static_cast<std::uint16_t>((noise & 0x807FU) | (0x3E80U + (noise >> 8 & 0x180U)));
  }
  ptx::fence_proxy_async();
  __syncthreads();
  const std::uint32_t a = ptx::descriptor_along(ptx::shared_address(operands));
  const std::uint32_t b = a + 64 * 128 / 16;
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0.0F;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::Wgmma<Dtype::bf16, 256>::shared(d, ptx::descriptor(a + 2 * i),
                                           ptx::descriptor(b + 2 * i), 1);
    }
    ptx::wgmma_commit();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_results(d);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += d[i];
  if (sum == -1.0F) *never = sum;  // so that nothing is left out
}

}  // namespace tessera::cuda::sm90
