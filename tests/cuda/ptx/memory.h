// In place of src/cuda/ptx/memory.h where a test runs a kernel on the host (cuda/host_threads.h).
#pragma once

#include <cstdint>
#include <cstring>

namespace tessera::cuda::ptx {

inline void store_if(bool condition, void* to, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t words[2] = {a, b};
  if (condition) std::memcpy(to, words, sizeof words);
}
inline void store_if(bool condition, std::uint16_t* to, std::uint16_t x) {
  if (condition) *to = x;
}
/// Without a body: shared memory has no addresses here.
void store_shared(std::uint32_t to, const std::uint32_t (&words)[4]);

}  // namespace tessera::cuda::ptx
