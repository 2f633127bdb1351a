// In place of src/cuda/ptx/memory.h where a test runs a kernel on the host (cuda/host_threads.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tensor_map.h"

namespace tessera::cuda::ptx {

/// Shared memory of a test's own, at its address there.
inline std::byte* shared_memory(std::uint32_t address) {
  alignas(1024) static std::array<std::byte, 1 << 17> memory;
  return memory.data() + address;
}

/// A tensor of 16-bit elements as the copy engine knows it, and its box; lies in a TensorMap.
struct HostMap {
  const std::uint16_t* data;
  std::int64_t sizes[4], strides[4];  ///< elements
  int rows;                           ///< of a box of 64 columns, swizzled by 128 bytes
};
static_assert(sizeof(HostMap) <= sizeof(TensorMap));

/// What the copy engine does: zeros outside the tensor, and units of 16 bytes of a row where the
/// address of the row in shared memory says.
inline void tma_load(std::uint32_t to, const TensorMap& map, std::uint32_t /*barrier*/, int c0,
                     int c1, int c2, int c3) {
  HostMap host;
  std::memcpy(&host, &map, sizeof host);
  for (int row = 0; row < host.rows; ++row) {
    for (int column = 0; column < 64; ++column) {
      const std::int64_t at[4] = {c0 + column, c1 + row, c2, c3};
      bool inside = true;
      std::int64_t offset = 0;
      for (int i = 0; i < 4; ++i) {
        inside = inside && at[i] >= 0 && at[i] < host.sizes[i];
        offset += at[i] * host.strides[i];
      }
      const std::uint16_t x = inside ? host.data[offset] : 0;
      const std::uint32_t line = to + static_cast<std::uint32_t>(row) * 128;
      const std::uint32_t unit = static_cast<std::uint32_t>(column / 8) ^ line / 128 % 8;
      std::memcpy(shared_memory(line + unit * 16 + column % 8 * 2), &x, sizeof x);
    }
  }
  arrivals().bytes += host.rows * 128;
}

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
