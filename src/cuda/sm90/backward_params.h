// What the kernel of the Hopper backward pass is given: a value filled in by backward_launch.cpp.
#pragma once

#include "cuda/ptx/tensor_map.h"
#include "cuda/tile/backward_params.h"

namespace tessera::cuda::sm90 {

/// Accumulators of a row block's dQ come in pieces of 64 rows x 64 columns in the order of a
/// warpgroup's registers.
inline constexpr int kPieceFloats = 64 * 64;

/// Where a thread's registers 4 i to 4 i + 3 lie in a piece.
TESSERA_HD constexpr int piece_place(int thread, int i) { return (i * 128 + thread) * 4; }

struct BackwardParams : BackwardPass {
  ptx::TensorMap q, k, v, dout;  ///< (head_dim, seqlen, heads, batch), innermost first
  Source q_source, k_source, v_source, dout_source;  ///< the same, for rows that take any layout

  void* dq = nullptr;  ///< written here (backward_pieces.h) unless consumers split roles
  core::Strides dq_strides;
  core::WorkOrder row_work;  ///< blocks of rows of query heads, as they get complete
  int workers = 0;           ///< blocks of threads: each looks after its share of row_work
};

}  // namespace tessera::cuda::sm90
