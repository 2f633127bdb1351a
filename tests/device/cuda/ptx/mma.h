// cuda/ptx/mma.h for fibers: copies are there at once.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/barrier.h"

namespace tessera::cuda::ptx {

using CachePolicy = std::uint64_t;
inline CachePolicy cache_policy(bool once) { return once ? 1 : 0; }
inline void copy_async(std::uint32_t to, const void* from, bool exists) {
  if (exists) {
    std::memcpy(shared_memory(to), from, 16);
  } else {
    std::memset(shared_memory(to), 0, 16);
  }
}
inline void copy_async(std::uint32_t to, const void* from, bool exists, CachePolicy /*policy*/) {
  copy_async(to, from, exists);
}
inline void copy_arrive(std::uint32_t barrier) { mbarrier_arrive(barrier); }
inline void copy_commit() {}
template <int kPending>
void copy_wait() {}

}  // namespace tessera::cuda::ptx
