// From the sums of dQ to its gradient: a piece of it, or, in a launch of its own, all of a row
// block.
#pragma once

#include "cuda/aux/backward_rows.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::sm90 {

/// The gradient of a piece, by one of 128 threads. rows, columns: how many exist from `to` on,
/// which is the address of the first; stride: elements from one row to the next.
template <Dtype kType, bool kAnyLayout>
__device__ __forceinline__ void finish_piece(const float* sums, int thread, float scale, int rows,
                                             int columns, std::uint16_t* to, std::int64_t stride) {
  const int warp = thread / 32;
  const std::uint32_t lane = static_cast<std::uint32_t>(thread) % 32;
  float x[32];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(sums + piece_place(thread, i));
    x[4 * i] = four.x;
    x[4 * i + 1] = four.y;
    x[4 * i + 2] = four.z;
    x[4 * i + 3] = four.w;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(warp, lane, half);
    store_row<kType, kAnyLayout>(x, half, scale, row < rows, lane, columns,
                                 to + row * stride + store_column(lane));
  }
}

/// dQ from its accumulators, where the main kernel splits roles or has not run.
template <Dtype kType>
__device__ __forceinline__ void finish_rows(const aux::BackwardRowParams& p) {
  const aux::RowPlace at(p);
  if (!at.has_rows()) return;
  const float* const sums = p.rows.dq_of(at.block, at.head);
  const int pieces = p.rows.sums / kPieceFloats;
  const int pieces_of_columns = pieces * 64 / p.rows.blocks.block_m;
  for (int piece = 0; piece < pieces; ++piece) {
    const int query = at.first_query + piece / pieces_of_columns * 64;
    const int column = piece % pieces_of_columns * 64;
    if (column >= p.head_dim) continue;
    std::uint16_t* const to =
        static_cast<std::uint16_t*>(p.dq) + at.offset(p.dq_strides, query) + column;
    const float* const from = sums + piece * kPieceFloats;
    const int thread = static_cast<int>(threadIdx.x);
    const int rows = at.sequence.seqlen_q - query, columns = p.head_dim - column;
    const std::int64_t stride = p.dq_strides.seqlen;
    if (p.aligned) {
      finish_piece<kType, false>(from, thread, p.softmax_scale, rows, columns, to, stride);
    } else {
      finish_piece<kType, true>(from, thread, p.softmax_scale, rows, columns, to, stride);
    }
  }
}

}  // namespace tessera::cuda::sm90
