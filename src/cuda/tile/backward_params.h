// What kernels of the backward pass are given, by wgmma and by mma.sync alike.
#pragma once

#include "core/philox.h"
#include "core/score.h"
#include "core/sequences.h"
#include "core/work.h"
#include "cuda/source.h"

namespace tessera::cuda {

/// What is kept of a row block and head between the kernels, see core::RowBlocks: block_m shifts
/// (core::backward_shift) and block_m deltas, and the sums of its dQ.
struct RowMemory {
  float* statistics = nullptr;  ///< [row block][head][2][block_m]
  float* dq = nullptr;          ///< [row block][head][sums], in an order of the row's own
  core::RowBlocks blocks;
  int heads = 0;
  int sums = 0;  ///< block_m times the row's head_dim

  TESSERA_HD std::int64_t index_of(std::int64_t block, int head) const {
    return block * heads + head;
  }
  TESSERA_HD float* statistics_of(std::int64_t block, int head) const {
    return statistics + index_of(block, head) * 2 * blocks.block_m;
  }
  TESSERA_HD float* dq_at(std::int64_t index) const { return dq + index * sums; }
  TESSERA_HD float* dq_of(std::int64_t block, int head) const {
    return dq_at(index_of(block, head));
  }
};

/// Of the main kernel, whatever multiplies.
struct BackwardPass {
  RowMemory rows;
  /// [row block][head][2]: key blocks whose first or second consumer has added its dQ; where a
  /// block of threads adds as one, the first.
  std::int32_t* turns = nullptr;
  bool in_order = false;  ///< they add in an order that is always the same
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
  int group = 1;                      ///< query heads that share keys
  int head_dim = 0, head_dim_v = 0;
  bool dbias_adds = false;  ///< dbias are fp32 sums: several scores share an element
};

}  // namespace tessera::cuda
