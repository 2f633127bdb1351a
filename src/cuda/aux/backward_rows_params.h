// What the kernels around the backward's main one are given (backward_rows.h).
#pragma once

#include "cuda/tile/backward_params.h"

namespace tessera::cuda::aux {

inline constexpr int kRowThreads = 128;

/// Of the kernels before and after the main one, a block for every row block and head.
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
  std::int32_t* turns = nullptr;      ///< as in BackwardPass
  std::int32_t* next_tile = nullptr;  ///< as in BackwardPass
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

}  // namespace tessera::cuda::aux
