// CUDA's names for a kernel that runs on fibers (fibers.h). To be included before its headers.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/host_names.h"
#include "fibers.h"
#include "races.h"

// NOLINTBEGIN: CUDA's names
struct DeviceIndex {
  unsigned x = 0;
};
inline DeviceIndex threadIdx, blockIdx, gridDim;

namespace tessera::device {

/// What the threads of the warp show each other; row[i]: lane i's.
inline const Shown* show_warp(const Shown& mine, bool orders = false) {
  const Unseen unseen;
  const unsigned warp = threadIdx.x / kWarp;
  Meeting& meeting = block().warps[warp];
  auto& row = block().of_warps[meeting.generation % 2];
  row[threadIdx.x] = mine;
  static_cast<void>(meet(meeting, kWarp, orders));
  return row.data() + std::size_t{warp} * kWarp;
}

}  // namespace tessera::device

inline void __syncthreads() {
  static_cast<void>(
      tessera::device::meet(tessera::device::block().all, tessera::device::block().threads));
}
inline void __syncwarp() { static_cast<void>(tessera::device::show_warp({}, true)); }
template <class T>
T __shfl_sync(unsigned mask, T x, int lane) {
  if (mask == 1) return x;  // a thread that is alone
  tessera::device::Shown mine = {};
  std::memcpy(mine.data(), &x, sizeof x);
  T other;
  std::memcpy(&other, tessera::device::show_warp(mine)[lane].data(), sizeof other);
  return other;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lanes) {
  return __shfl_sync(mask, x, static_cast<int>(threadIdx.x % 32) ^ lanes);
}
#define __shared__ static
inline unsigned __ballot_sync(unsigned /*mask*/, bool x) {
  const auto* const row = tessera::device::show_warp({x ? 1U : 0U});
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(row[lane][0]) << lane;
  return votes;
}
inline bool __any_sync(unsigned /*mask*/, bool x) {
  const auto* const row = tessera::device::show_warp({x ? 1U : 0U});
  bool any = false;
  for (unsigned lane = 0; lane < 32; ++lane) any = any || row[lane][0] != 0;
  return any;
}
inline bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }
template <class T>
T __shfl_up_sync(unsigned mask, T x, int lanes) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, x, lane < lanes ? lane : lane - lanes);
}
/// Whether one of the block's threads has x.
inline bool __syncthreads_or(bool x) {
  const tessera::device::Unseen unseen;
  tessera::device::Block& block = tessera::device::block();
  bool& any = block.any_of_all[block.all.generation % 3];
  block.any_of_all[(block.all.generation + 1) % 3] = false;
  any = any || x;
  __syncthreads();
  return any;
}
inline bool __syncthreads_and(bool x) { return !__syncthreads_or(!x); }
inline void __threadfence() {}
template <class T>
T atomicAdd(T* to, T x) {
  const tessera::device::Unseen unseen;
  const T before = *to;
  *to += x;
  return before;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<std::uint32_t>(bits)); }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline int max(int a, int b) { return a < b ? b : a; }
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) {
  const unsigned d = a < b ? b : a;
  return c < d ? d : c;
}
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : 1 + std::countr_zero(static_cast<unsigned>(x)); }
inline int min(int a, int b) { return b < a ? b : a; }
namespace tessera::cuda {
/// NaN is a positive one, as a GPU's is, and not the host's.
inline float fmaf(float a, float b, float c) {
  const float y = std::fma(a, b, c);
  return y != y ? __uint_as_float(0x7fffffffU) : y;
}
}  // namespace tessera::cuda
// NOLINTEND
