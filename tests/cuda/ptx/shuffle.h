// In place of src/cuda/ptx/shuffle.h where a test runs a kernel on the host (cuda/host_threads.h):
// lanes meet once, not once a register.
#pragma once

#include <array>
#include <cstring>

namespace tessera::cuda::ptx {

template <typename Word, int kCount>
void exchange(const Word (&x)[kCount], int lanes, Word (&y)[kCount]) {
  constexpr int kMost = 32;
  static_assert(kCount <= kMost && sizeof(Word) == sizeof(float));
  static std::array<float[kMost], host::kThreads> words;
  std::memcpy(words[threadIdx.x], x, sizeof x);
  __syncwarp();
  std::memcpy(y, words[threadIdx.x ^ static_cast<unsigned>(lanes)], sizeof y);
  __syncwarp();
}

}  // namespace tessera::cuda::ptx
