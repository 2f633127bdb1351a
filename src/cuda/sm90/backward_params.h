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

/// What pieces that share a block of keys leave of its dV and dK (core::RowSteps), to be summed by
/// finish_keys (piece.h): as pieces of 64 keys x 64 columns, those of dV first, of keys after keys.
struct KeySums {
  float* data = nullptr;  ///< null: no keys are shared
  int heads = 0, blocks = 0, splits = 0;
  int pieces = 0, pieces_of_dv = 0;  ///< of a block of keys

  TESSERA_HD float* at(int batch, int head, int block, int split) const {
    const std::int64_t keys = (std::int64_t{batch} * heads + head) * blocks + block;
    return data + (keys * splits + split) * pieces * kPieceFloats;
  }
};

/// Of the kernel that sums these, a block for every piece of every block of keys.
struct FinishKeysParams {
  KeySums sums;
  core::Sequences sequences;
  void* dk = nullptr;
  void* dv = nullptr;
  core::Strides dk_strides, dv_strides;
  int block_n = 0;  ///< keys of a block
  int head_dim = 0, head_dim_v = 0;
  float softmax_scale = 0.0F;
  bool aligned = true;  ///< rows of dk and dv begin at multiples of 16 bytes
};

struct BackwardParams : BackwardPass {
  ptx::TensorMap q, k, v, dout;  ///< (head_dim, seqlen, heads, batch), innermost first
  Source q_source, k_source, v_source, dout_source;  ///< the same, for rows that take any layout

  void* dq = nullptr;  ///< written here (backward_pieces.h) unless consumers split roles
  core::Strides dq_strides;
  core::WorkOrder row_work;  ///< blocks of rows of query heads, as they get complete
  int workers = 0;           ///< blocks of threads: each looks after its share of row_work
  KeySums key_sums;
};

}  // namespace tessera::cuda::sm90
