// What the kernels of the Hopper backward pass are given: values filled in by backward_launch.cpp.
#pragma once

#include "core/philox.h"
#include "core/score.h"
#include "core/sequences.h"
#include "core/work.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/source.h"

namespace tessera::cuda::sm90 {

/// Accumulators of a row block's dQ come in pieces of 64 rows x 64 columns in the order of a
/// warpgroup's registers.
inline constexpr int kPieceFloats = 64 * 64;

/// Where a thread's registers 4 i to 4 i + 3 lie in a piece.
TESSERA_HD constexpr int piece_place(int thread, int i) { return (i * 128 + thread) * 4; }

/// What is kept of a row block and head between the kernels, see core::RowBlocks: block_m shifts
/// (core::backward_shift) and block_m deltas, and the pieces of its dQ.
struct RowMemory {
  float* statistics = nullptr;  ///< [row block][head][2][block_m]
  float* dq = nullptr;          ///< [row block][head][pieces][kPieceFloats]
  core::RowBlocks blocks;
  int heads = 0;
  int pieces = 0;

  TESSERA_HD std::int64_t index_of(std::int64_t block, int head) const {
    return block * heads + head;
  }
  TESSERA_HD float* statistics_of(std::int64_t block, int head) const {
    return statistics + index_of(block, head) * 2 * blocks.block_m;
  }
  TESSERA_HD float* dq_of(std::int64_t block, int head) const {
    return dq + index_of(block, head) * pieces * kPieceFloats;
  }
};

/// Of the main kernel.
struct BackwardParams {
  ptx::TensorMap q, k, v, dout;  ///< (head_dim, seqlen, heads, batch), innermost first
  Source q_source, k_source, v_source, dout_source;  ///< the same, for rows that take any layout

  RowMemory rows;
  /// [row block][head][2]: key blocks whose first or second consumer has added its dQ.
  std::int32_t* turns = nullptr;
  bool in_order = false;  ///< they add in an order that is always the same
  void* dq = nullptr;     ///< written here (backward_pieces.h) unless consumers split roles
  core::Strides dq_strides;
  void* dk = nullptr;
  void* dv = nullptr;
  core::Strides dk_strides, dv_strides;

  core::Sequences sequences;
  core::Window window;
  Extras extras;
  void* dbias = nullptr;  ///< null: not asked for
  core::BiasStrides dbias_strides;

  core::Score score;
  core::Dropout dropout;

  core::WorkOrder work;               ///< blocks of keys of key/value heads
  std::int32_t* next_tile = nullptr;  ///< of `work`
  core::WorkOrder row_work;           ///< blocks of rows of query heads, as they get complete
  int workers = 0;                    ///< blocks of threads: each looks after its share of row_work
  int heads = 0, group = 1;           ///< query heads; those that share keys
  int head_dim = 0, head_dim_v = 0;
  bool dbias_adds = false;  ///< dbias are fp32 sums: several scores share an element
};

/// Of the kernels before and after it, a block for every row block and head.
struct BackwardRowParams {
  RowMemory rows;
  Source o, dout;  ///< before
  const float* softmax_lse = nullptr;
  const float* dsoftmax_lse = nullptr;  ///< null: 0
  std::int64_t lse_head = 0;            ///< elements of softmax_lse from one head to the next
  void* dq = nullptr;                   ///< after
  core::Strides dq_strides;
  core::Sequences sequences;
  core::Window window;
  const float* sink = nullptr;  ///< null: no sink, or its gradient is not asked for
  float* sink_parts = nullptr;  ///< [head][batch][blocks per sequence]: sums over a block's rows
  float* dsink = nullptr;
  std::int32_t* turns = nullptr;      ///< as in BackwardParams
  std::int32_t* next_tile = nullptr;  ///< as in BackwardParams
  float softmax_scale = 0.0F;
  int batch = 0, heads = 0;
  int head_dim = 0, head_dim_v = 0;
  /// Whoever is the first to add to a row block's dQ stores: only where nobody does, it begins as
  /// 0.
  bool first_stores = false;
  bool aligned = true;  ///< rows of o, dout and dq begin at multiples of 16 bytes
};

/// Of the kernels that begin and end the gradient of a bias: every element of the stored
/// dimensions (batch, heads, queries, keys) once.
struct BackwardBiasParams {
  std::int64_t sizes[4] = {};
  void* dbias = nullptr;
  std::int64_t strides[4] = {};
  Dtype dtype = Dtype::f32;
  float* sums = nullptr;  ///< [sizes] where several scores share an element; null: none do

  TESSERA_HD std::int64_t count() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }
};

}  // namespace tessera::cuda::sm90
