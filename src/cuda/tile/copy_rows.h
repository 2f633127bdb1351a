// Rows of a tensor of any layout on their way to a buffer in shared memory, element by element: for
// rows of the catalog that take what neither the copy engine nor cp.async can address.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.h"

namespace tessera::cuda {

/// What the copy engine or cp.async would do, 8 elements a thread at a time, by kThreads threads,
/// of which `thread` is one. row_at(i, from): where the i-th row of the buffer lies; false: it
/// becomes zeros.
template <int kRows, int kThreads, class RowAt>
__device__ __forceinline__ void copy_rows(std::uint32_t to, int dim, int chunks,
                                          const RowAt& row_at,
                                          int thread = static_cast<int>(threadIdx.x)) {
  const int units = chunks * 8;  // of a row
  // Unrolled, it would need more than a producer's 40 registers.
#pragma unroll 1
  for (int i = thread; i < kRows * units; i += kThreads) {
    const int row = i / units, unit = i % units;
    std::uint32_t words[4] = {};
    if (const std::uint16_t* x = nullptr; row_at(row, x)) {
      x += unit * 8;
      const int left = dim - unit * 8;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (2 * j < left) words[j] = x[2 * j];
        if (2 * j + 1 < left) words[j] |= std::uint32_t{x[2 * j + 1]} << 16;
      }
    }
    ptx::store_shared(to + unit / 8 * kRows * 128 + row * 128 + (unit % 8 ^ row % 8) * 16, words);
  }
}

}  // namespace tessera::cuda
