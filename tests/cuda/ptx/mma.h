// In place of src/cuda/ptx/mma.h where a kernel runs on the host (cuda/host_threads.h,
// device/fibers.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/memory.h"

namespace tessera::cuda::ptx {

inline void copy_async(std::uint32_t to, const void* from, bool exists) {
  if (exists) {
    std::memcpy(shared_memory(to), from, 16);
  } else {
    std::memset(shared_memory(to), 0, 16);
  }
}
inline void copy_commit() {}
template <int kPending>
void copy_wait() {}

}  // namespace tessera::cuda::ptx
