// Blocks of threads that run side by side and see each other's shared memory (a cluster). PTX ISA,
// "Parallel Synchronization and Communication Instructions", "Data Movement and Conversion
// Instructions".
#pragma once

#include <cstdint>

namespace tessera::cuda::ptx {

/// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ std::uint32_t address_in(std::uint32_t block, std::uint32_t address) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

/// Stores 16 bytes in another block's shared memory. Nobody waits for it; it completes on an
/// mbarrier there, as a copy does.
__device__ __forceinline__ void store_async(std::uint32_t to, float a, float b, float c, float d,
                                            std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}

/// The same of 4 bytes.
__device__ __forceinline__ void store_async(std::uint32_t to, std::uint32_t word,
                                            std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(word), "r"(barrier)
      : "memory");
}

/// Arrives at another block's mbarrier. Without the order that a cluster's scope would give, which
/// costs a fence of the whole GPU: what the thread has read of its own shared memory before, it
/// has.
__device__ __forceinline__ void mbarrier_arrive_there(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// The same if a condition holds.
__device__ __forceinline__ void mbarrier_arrive_there_if(bool condition, std::uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}" ::"r"(barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}

/// Copies `bytes` of this block's shared memory to another's, if a condition holds; a multiple of
/// 16, as are the addresses. Completes on an mbarrier there.
__device__ __forceinline__ void bulk_send_if(bool condition, std::uint32_t to, std::uint32_t from,
                                             std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];\n}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier), "r"(static_cast<int>(condition))
      : "memory");
}

/// Waits for all threads of all blocks of the cluster that have not ended.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

}  // namespace tessera::cuda::ptx
