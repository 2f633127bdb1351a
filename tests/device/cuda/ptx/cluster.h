// In place of src/cuda/ptx/cluster.h where a kernel runs on fibers (fibers.h).
#pragma once

#include "cuda/ptx/barrier.h"

namespace tessera::cuda::ptx {

inline std::uint32_t address_in(std::uint32_t block, std::uint32_t address) {
  return offset_of(address) | block << kBlockShift;
}
inline void store_async(std::uint32_t to, float a, float b, float c, float d,
                        std::uint32_t barrier) {
  const float four[4] = {a, b, c, d};
  std::memcpy(shared_memory(to), four, sizeof four);
  mbarrier_complete(barrier, sizeof four);
}
inline void store_async(std::uint32_t to, std::uint32_t word, std::uint32_t barrier) {
  std::memcpy(shared_memory(to), &word, sizeof word);
  mbarrier_complete(barrier, sizeof word);
}
inline void mbarrier_arrive_there(std::uint32_t barrier) { mbarrier_arrive(barrier); }
inline void mbarrier_arrive_there_if(bool condition, std::uint32_t barrier) {
  mbarrier_arrive_if(condition, barrier);
}
inline void bulk_send_if(bool condition, std::uint32_t to, std::uint32_t from, std::uint32_t bytes,
                         std::uint32_t barrier) {
  if (!condition) return;
  std::memcpy(shared_memory(to), shared_memory(from), bytes);
  mbarrier_complete(barrier, bytes);
}
inline void cluster_sync() { device::meet_cluster(); }

}  // namespace tessera::cuda::ptx
