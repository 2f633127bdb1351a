// In place of src/cuda/ptx/barrier.h where a kernel runs on fibers (fibers.h).
#pragma once

#include "cuda_names.h"

namespace tessera::cuda::ptx {

/// Above the offset in a block's shared memory an address has the block's number in its cluster.
inline constexpr unsigned kBlockShift = 24;
inline std::uint32_t offset_of(std::uint32_t address) {
  return address & ((1U << kBlockShift) - 1);
}
inline device::Block& block_of(std::uint32_t address) {
  return device::block(address >> kBlockShift);
}

inline char* shared_memory(std::uint32_t address) {
  return block_of(address).shared + offset_of(address);
}
inline std::uint32_t shared_address(const void* p) {
  const auto offset = static_cast<const char*>(p) - device::block().shared;
  return static_cast<std::uint32_t>(offset) | device::block_number() << kBlockShift;
}

inline device::Mbarrier& mbarrier(std::uint32_t address) {
  return block_of(address).mbarriers.at(offset_of(address));
}
/// Its phase ends where all have arrived and all bytes are there.
inline void turn(device::Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}
inline void mbarrier_init(std::uint32_t address, std::uint32_t arrivals) {
  const device::Unseen unseen;
  block_of(address).mbarriers[offset_of(address)] = {arrivals, arrivals, 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(std::uint32_t address) {
  const device::Unseen unseen;
  device::Mbarrier& barrier = mbarrier(address);
  device::release(barrier.orders + barrier.phase % 2);
  --barrier.pending;
  turn(barrier);
}
inline void mbarrier_arrive_if(bool condition, std::uint32_t address) {
  if (condition) mbarrier_arrive(address);
}
inline void mbarrier_expect(std::uint32_t address, std::uint32_t bytes) {
  const device::Unseen unseen;
  mbarrier(address).bytes += bytes;
  mbarrier_arrive(address);
}
inline void mbarrier_expect_if(bool condition, std::uint32_t address, std::uint32_t bytes) {
  if (condition) mbarrier_expect(address, bytes);
}
/// The copy engine's part of it.
inline void mbarrier_complete(std::uint32_t address, std::int64_t bytes) {
  const device::Unseen unseen;
  device::Mbarrier& barrier = mbarrier(address);
  device::release(barrier.orders + barrier.phase % 2);
  barrier.bytes -= bytes;
  turn(barrier);
}
inline void mbarrier_wait(std::uint32_t address, std::uint32_t parity) {
  const device::Unseen unseen;
  device::Mbarrier& barrier = mbarrier(address);
  device::wait([&] { return barrier.phase % 2 != parity; });
  device::acquire(barrier.orders + parity);
}
inline void barrier_sync(int id, int threads) {
  static_cast<void>(device::meet(device::block().named[static_cast<std::size_t>(id)],
                                 static_cast<unsigned>(threads)));
}
/// Comes without waiting.
inline void barrier_arrive(int id, int threads) {
  const device::Unseen unseen;
  device::Meeting& meeting = device::block().named[static_cast<std::size_t>(id)];
  device::release(meeting.orders + meeting.generation % 2);
  if (++meeting.arrived < static_cast<unsigned>(threads)) return;
  meeting.arrived = 0;
  ++meeting.generation;
}
/// Each of the threads shows whether it has x.
inline bool barrier_any(int id, int threads, bool x) {
  const device::Unseen unseen;
  auto& any = device::block().any_of_named;
  device::Meeting& meeting = device::block().named[static_cast<std::size_t>(id)];
  bool& mine = any[meeting.generation % 3][static_cast<std::size_t>(id)];
  any[(meeting.generation + 1) % 3][static_cast<std::size_t>(id)] = false;
  mine = mine || x;
  static_cast<void>(device::meet(meeting, static_cast<unsigned>(threads)));
  return mine;
}
inline void fence_proxy_async() {}

template <int kCount>
void lower_registers() {}
template <int kCount>
void raise_registers() {}

}  // namespace tessera::cuda::ptx
