// What memory gives on any GPU: plain reads. `tessera bench` states kernels as a share of it.
#pragma once

#include <cstdint>

namespace tessera::cuda {

/// Every block reads its share of `count` 16-byte units.
template <int kThreads>
__device__ __forceinline__ void read_peak(const uint4* memory, std::int64_t count, float* never) {
  constexpr int kUnroll = 8;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  std::uint32_t sum = 0;
  std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + (kUnroll - 1) * step < count; i += kUnroll * step) {
    uint4 x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) x[j] = __ldcs(memory + i + j * step);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (sum == 0x12345678U) *never = 1.0F;
}

}  // namespace tessera::cuda
