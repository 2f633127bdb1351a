// The tile simulator: runs the loop skeleton of a catalog row (its tile sizes, its order of work,
// its splits) in scalar fp32 arithmetic, calling the same functions of core/ that the kernels call.
// It proves the tiling of a row without the hardware that runs it.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace tessera::tile {

/// Results without strides; rows of q over all sequences, heads inside.
struct Simulated {
  std::vector<float> o;      ///< [rows_q][num_heads][head_dim_v]
  std::vector<float> lse;    ///< [rows_q][num_heads]
  std::vector<float> dq;     ///< [rows_q][num_heads][head_dim]
  std::vector<float> dk;     ///< [rows_k][num_heads_k][head_dim]
  std::vector<float> dv;     ///< [rows_k][num_heads_k][head_dim_v]
  std::vector<float> dsink;  ///< [num_heads]; GPU rows only
  std::vector<float> dbias;  ///< [stored dimensions]; GPU rows only
  int masked_tiles = 0;      ///< tiles that went through the mask
  int full_tiles = 0;        ///< tiles that did not
  int merged_items = 0;      ///< a GPU's decoding: items of several parts
  int high_boxes = 0;        ///< a GPU's tiles, in pages: boxes of several keys
  int torn_boxes = 0;        ///< the same: that do not lie in one page
  int lost_parts = 0;        ///< the same: not there when merged, or lying where another one is put
};

/// Tensors must be fp32. forward: reads q, k, v and the options.
Simulated simulate_forward(const PlanData& plan, const Tensors& tensors);

/// The same of a GPU's row that decodes.
Simulated simulate_decode(const PlanData& plan, const Tensors& tensors);

/// Reads also dout, and o, softmax_lse (as core/ lays them out: [batch, num_heads, seqlen_q] or
/// packed).
Simulated simulate_backward(const PlanData& plan, const Tensors& tensors);

}  // namespace tessera::tile
