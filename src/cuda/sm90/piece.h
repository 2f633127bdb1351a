// From sums of gradients in fp32 to what they are asked for in: a piece of dQ, or, in launches of
// their own, all of a row block, and dV and dK of keys that several blocks of threads share.
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

/// Accumulators of 64 rows as pieces, one after another, by one of 128 threads.
template <int kCount>
__device__ __forceinline__ void store_pieces(const float (&x)[kCount], float* to, int thread) {
  to += piece_place(thread, 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    *reinterpret_cast<float4*>(to + i * 128) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
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

/// A piece of dV or dK: what pieces of work that share its keys have left, summed in their order.
template <Dtype kType>
__device__ __forceinline__ void finish_keys(const FinishKeysParams& p) {
  std::int64_t index = blockIdx.x;
  const int place = static_cast<int>(index % p.sums.pieces);
  index /= p.sums.pieces;
  const int block = static_cast<int>(index % p.sums.blocks);
  index /= p.sums.blocks;
  const int head = static_cast<int>(index % p.sums.heads);
  const core::Sequence sequence = p.sequences.at(static_cast<int>(index / p.sums.heads));
  const bool values = place < p.sums.pieces_of_dv;
  const int piece = values ? place : place - p.sums.pieces_of_dv;
  const int chunks =
      (values ? p.sums.pieces_of_dv : p.sums.pieces - p.sums.pieces_of_dv) * 64 / p.block_n;
  const int key = block * p.block_n + piece / chunks * 64, column = piece % chunks * 64;
  const int columns = (values ? p.head_dim_v : p.head_dim) - column;
  if (key >= sequence.seqlen_k || columns <= 0) return;

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const std::uint32_t lane = threadIdx.x % 32;
  float x[32] = {};
  for (int split = 0; split < p.sums.splits; ++split) {
    const float* const from = p.sums.at(sequence.batch, head, block, split) +
                              std::int64_t{place} * kPieceFloats + piece_place(thread, 0);
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i * 128);
      x[i] += four.x;
      x[i + 1] += four.y;
      x[i + 2] += four.z;
      x[i + 3] += four.w;
    }
  }
  const core::Strides& strides = values ? p.dv_strides : p.dk_strides;
  std::uint16_t* const to = static_cast<std::uint16_t*>(values ? p.dv : p.dk) +
                            sequence.key_offset(strides, key, head) + column + store_column(lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(warp, lane, half);
    const bool exists = row < sequence.seqlen_k - key;
    std::uint16_t* const at = to + row * strides.seqlen;
    const float scale = values ? 1.0F : p.softmax_scale;
    if (p.aligned) {
      store_row<kType, false>(x, half, scale, exists, lane, columns, at);
    } else {
      store_row<kType, true>(x, half, scale, exists, lane, columns, at);
    }
  }
}

}  // namespace tessera::cuda::sm90
