// Rings of buffers in shared memory, and the barriers by which a producer and the consumers hand
// them to each other.
#pragma once

#include "cuda/ptx/barrier.h"

namespace tessera::cuda::sm90 {

/// A ring of buffers in shared memory, as producer and consumers count it: item i lies in buffer
/// i % kSize and is the (i / kSize)-th there.
template <int kSize>
struct Ring {
  std::uint32_t data;   ///< buffer 0
  std::uint32_t bytes;  ///< of a buffer
  std::uint32_t full;   ///< mbarriers, 8 bytes each
  std::uint32_t empty;

  __device__ __forceinline__ std::uint32_t buffer(std::uint32_t i) const {
    return data + i % kSize * bytes;
  }
  __device__ __forceinline__ std::uint32_t full_barrier(std::uint32_t i) const {
    return full + i % kSize * 8;
  }
  __device__ __forceinline__ void wait_full(std::uint32_t i) const {
    ptx::mbarrier_wait(full_barrier(i), i / kSize & 1);
  }
  __device__ __forceinline__ void release(std::uint32_t i) const {
    ptx::mbarrier_arrive(empty + i % kSize * 8);
  }
  /// By the thread of a warpgroup that speaks for it, while the others go on with it.
  __device__ __forceinline__ void release_if(bool condition, std::uint32_t i) const {
    ptx::mbarrier_arrive_if(condition, empty + i % kSize * 8);
  }
  /// Producer: waits until the buffer is free.
  __device__ __forceinline__ void claim(std::uint32_t i) const {
    ptx::mbarrier_wait(empty + i % kSize * 8, (i / kSize & 1) ^ 1);
  }
  /// Producer: the buffer will be full once `count` bytes have come from the copy engine; what this
  /// thread has written to shared memory before is seen by those who wait. Returns the full
  /// barrier.
  __device__ __forceinline__ std::uint32_t announce(std::uint32_t i, std::uint32_t count) const {
    ptx::mbarrier_expect(full + i % kSize * 8, count);
    return full + i % kSize * 8;
  }
  /// One of several threads or warps that fill a buffer without the copy engine.
  __device__ __forceinline__ void arrive_full(std::uint32_t i) const {
    ptx::mbarrier_arrive(full + i % kSize * 8);
  }
  __device__ __forceinline__ void arrive_full_if(bool condition, std::uint32_t i) const {
    ptx::mbarrier_arrive_if(condition, full + i % kSize * 8);
  }
  /// One thread, before anybody uses the ring; the copy engine sees it after fence_mbarrier_init().
  __device__ __forceinline__ void initialise(std::uint32_t producers,
                                             std::uint32_t consumers) const {
    for (int i = 0; i < kSize; ++i) {
      ptx::mbarrier_init(full + 8 * i, producers);
      ptx::mbarrier_init(empty + 8 * i, consumers);
    }
  }
};

}  // namespace tessera::cuda::sm90
