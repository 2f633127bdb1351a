// From the sums of dQ that the backward by mma.sync leaves to its gradient. Sums of a block of rows
// lie as its warps add them: [columns / 8][4][block_m / 16][32], the accumulators of 16 rows and 8
// columns (ptx/mma.h) one after another, of all lanes side by side.
#pragma once

#include "cuda/aux/backward_rows.h"

namespace tessera::cuda::mma {

template <Dtype kType, bool kAnyLayout>
__device__ __forceinline__ void finish_block(const aux::BackwardRowParams& p,
                                             const aux::RowPlace& at) {
  constexpr int kWarps = aux::kRowThreads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::uint32_t lane = threadIdx.x % 32;
  const int groups = p.rows.blocks.block_m / 16, pieces = core::ceil_div(p.head_dim, 16);
  const float* const sums = p.rows.dq_of(at.block, at.head);
  for (int i = warp; i < groups * pieces; i += kWarps) {
    const int group = i % groups, column = i / groups * 16;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = sums[((column / 2 + j) * groups + group) * 32 + lane];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = at.first_query + group * 16 + static_cast<int>(lane) / 4 + 8 * half;
      std::uint16_t* const to = static_cast<std::uint16_t*>(p.dq) + at.offset(p.dq_strides, query) +
                                column + store_column(lane);
      store_row<kType, kAnyLayout>(x, half, p.softmax_scale, query < at.sequence.seqlen_q, lane,
                                   p.head_dim - column, to);
    }
  }
}

/// A row block and head.
template <Dtype kType>
__device__ __forceinline__ void finish_rows(const aux::BackwardRowParams& p) {
  const aux::RowPlace at(p);
  if (!at.has_rows()) return;
  if (p.aligned) {
    finish_block<kType, false>(p, at);
  } else {
    finish_block<kType, true>(p, at);
  }
}

}  // namespace tessera::cuda::mma
