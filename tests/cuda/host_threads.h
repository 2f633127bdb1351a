// A block of a kernel's threads as threads of the host, for kernels that have no instructions of
// their own but those in cuda/ptx/ beside this file. To be included before them.
#pragma once

#include <array>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "cuda/host_names.h"

// NOLINTBEGIN: CUDA's names
#define __shared__ static

namespace tessera::host {

constexpr int kThreads = 128, kWarp = 32;

struct Index {
  unsigned x = 0;
};

/// Where the threads of the block meet.
struct Meetings {
  std::barrier<> block{kThreads};
  std::barrier<> warps[kThreads / kWarp] = {std::barrier<>(kWarp), std::barrier<>(kWarp),
                                            std::barrier<>(kWarp), std::barrier<>(kWarp)};
  std::array<float, kThreads> floats = {};
  std::array<std::uint32_t, kThreads> words = {};
  std::array<std::uint64_t, kThreads> longs = {};
};

inline Meetings& meetings() {
  static Meetings all;
  return all;
}
inline float& slot(unsigned thread, float /*type*/) { return meetings().floats[thread]; }
inline std::uint32_t& slot(unsigned thread, std::uint32_t /*type*/) {
  return meetings().words[thread];
}
inline std::uint64_t& slot(unsigned thread, std::uint64_t /*type*/) {
  return meetings().longs[thread];
}

}  // namespace tessera::host

inline thread_local tessera::host::Index threadIdx, blockIdx, gridDim;

template <class T>
T atomicAdd(T* to, T x) {
  return std::atomic_ref<T>(*to).fetch_add(x);
}
inline void __syncwarp() {
  tessera::host::meetings().warps[threadIdx.x / tessera::host::kWarp].arrive_and_wait();
}
inline void __syncthreads() { tessera::host::meetings().block.arrive_and_wait(); }
template <class T>
T __shfl_xor_sync(unsigned /*mask*/, T x, int lanes) {
  using namespace tessera::host;
  std::barrier<>& warp = meetings().warps[threadIdx.x / kWarp];
  slot(threadIdx.x, x) = x;
  warp.arrive_and_wait();
  const T other = slot(threadIdx.x ^ static_cast<unsigned>(lanes), x);
  warp.arrive_and_wait();
  return other;
}
/// Of the warp's parts of `width` threads: the value of its lane-th.
template <class T>
T __shfl_sync(unsigned /*mask*/, T x, int lane, int width = tessera::host::kWarp) {
  using namespace tessera::host;
  std::barrier<>& warp = meetings().warps[threadIdx.x / kWarp];
  slot(threadIdx.x, x) = x;
  warp.arrive_and_wait();
  const unsigned parts = static_cast<unsigned>(width);
  const T other = slot(threadIdx.x / parts * parts + static_cast<unsigned>(lane) % parts, x);
  warp.arrive_and_wait();
  return other;
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  std::uint32_t votes = std::uint32_t{x} << threadIdx.x % tessera::host::kWarp;
  for (int lanes = 1; lanes < tessera::host::kWarp; lanes *= 2) {
    votes |= __shfl_xor_sync(mask, votes, lanes);
  }
  return votes;
}
inline bool __any_sync(unsigned mask, bool x) {
  std::uint32_t any = x;
  for (int lanes = 1; lanes < tessera::host::kWarp; lanes *= 2) {
    any |= __shfl_xor_sync(mask, any, lanes);
  }
  return any != 0;
}
// NOLINTEND

namespace tessera::host {

/// A block's threads, which are there until the program ends: starting them takes as long as most
/// kernels.
class Threads {
 public:
  Threads() {
    for (unsigned t = 0; t < kThreads; ++t) {
      threads_.emplace_back([this, t] {
        threadIdx.x = t;
        for (start_.arrive_and_wait(); kernel_ != nullptr; start_.arrive_and_wait()) {
          gridDim.x = blocks_;
          for (blockIdx.x = 0; blockIdx.x < blocks_; ++blockIdx.x) {
            (*kernel_)();
            meetings().block.arrive_and_wait();
          }
          end_.arrive_and_wait();
        }
      });
    }
  }
  ~Threads() {
    kernel_ = nullptr;
    start_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  void run(unsigned blocks, const std::function<void()>& kernel) {
    blocks_ = blocks;
    kernel_ = &kernel;
    start_.arrive_and_wait();
    end_.arrive_and_wait();
  }

 private:
  unsigned blocks_ = 0;
  const std::function<void()>* kernel_ = nullptr;
  std::barrier<> start_{kThreads + 1}, end_{kThreads + 1};
  std::vector<std::thread> threads_;
};

/// Runs the blocks of a grid, one after another.
inline void launch(unsigned blocks, const std::function<void()>& kernel) {
  static Threads threads;
  threads.run(blocks, kernel);
}

}  // namespace tessera::host
