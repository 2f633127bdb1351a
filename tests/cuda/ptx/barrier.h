// In place of src/cuda/ptx/barrier.h where a test runs a kernel on the host (cuda/host_threads.h).
// Barriers count what arrives; nobody waits.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera::cuda::ptx {

/// What has been announced and has come, of all mbarriers.
struct Arrivals {
  std::atomic<int> threads = 0;
  std::atomic<std::int64_t> expected = 0, bytes = 0;
};
inline Arrivals& arrivals() {
  static Arrivals all;
  return all;
}

std::uint32_t shared_address(const void* p);  // without a body, as all addresses are made up
inline void mbarrier_init(std::uint32_t /*barrier*/, std::uint32_t /*arrivals*/) {}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(std::uint32_t /*barrier*/) { ++arrivals().threads; }
inline void mbarrier_arrive_if(bool condition, std::uint32_t /*barrier*/) {
  if (condition) ++arrivals().threads;
}
inline void mbarrier_expect(std::uint32_t /*barrier*/, std::uint32_t bytes) {
  ++arrivals().threads;
  arrivals().expected += bytes;
}
inline void mbarrier_wait(std::uint32_t /*barrier*/, std::uint32_t /*parity*/) {}
inline void barrier_sync(int /*id*/, int /*threads*/) {}
inline void fence_proxy_async() {}

}  // namespace tessera::cuda::ptx
