// Dropout of a warp's weights (S8): those of a forward pass, whose rows are queries.
#pragma once

#include "core/philox.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda {

/// Weights of a block of kCount / 2 * 4 keys, from first_key on, which is a multiple of Philox's
/// keys. A quad's pairs of neighbouring keys share a call: each of its lanes makes every fourth
/// one, and they exchange words. row_of(half): the rows' number among those of the head.
template <class RowOf, int kCount>
__device__ __forceinline__ void drop_weights(const core::Dropout& dropout, int batch, int head,
                                             int first_key, int lane, const RowOf& row_of,
                                             float (&weights)[kCount]) {
  static_assert(kCount <= 32);
  std::uint32_t kept = 0;  // bit i: of weights[i]
#pragma unroll 2
  for (int first = 0; first < kCount / 2; first += 4) {
    const int pair = first + lane % 4;
    core::Philox4<std::uint32_t> random = core::dropout_bits<std::uint32_t>(
        dropout, batch, head, row_of(pair % 2), first_key / core::kPhiloxKeys + pair / 2);
    transpose_in_quad(lane, random.word);
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const std::uint32_t half = core::dropout_half(random.word[i], 2 * i + j);
        if (core::dropout_keeps(dropout, half)) bits |= 1U << (2 * i + j);
      }
    }
    kept |= bits << 2 * first;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    weights[i] = (kept >> i & 1) != 0 ? weights[i] * dropout.keep_scale : 0.0F;
  }
}

}  // namespace tessera::cuda
