// What the Hopper forward kernel is given: one value, filled in by forward_launch.cpp, read by
// forward.h.
#pragma once

#include "core/divisor.h"
#include "core/pages.h"
#include "core/philox.h"
#include "core/scales.h"
#include "core/score.h"
#include "core/sequences.h"
#include "core/work.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/source.h"

namespace tessera::cuda::sm90 {

struct ForwardParams {
  ptx::TensorMap q, k, v;  ///< (head_dim, seqlen, heads, batch), innermost first

  Source q_source, k_source, v_source;  ///< the same, for rows that take any layout

  void* o = nullptr;
  core::Strides o_strides;
  float* softmax_lse = nullptr;  ///< may be null

  core::Sequences sequences;
  core::Window window;
  const float* sink = nullptr;  ///< null: no sink
  Extras extras;

  core::Score score;
  core::SoftcapSeries series;
  core::Dropout dropout;
  std::int64_t lse_head = 0;  ///< elements of softmax_lse from one head to the next

  core::WorkOrder work;
  std::int32_t* next_tile = nullptr;  ///< GpuForwardLayout
  core::ShiftedRows rows;             ///< of a tile: of one query head, or of a group's
  core::Divisor group;                ///< heads of `work` that share keys
  int head_dim = 0, head_dim_v = 0;

  core::Cache cache;
  core::Divisor page_size;  ///< of the cache's pages
  /// Keys that are fetched at a time where they lie in pages: no box has keys of two. 1: threads
  /// copy rows; 0: there are no pages.
  int box_keys = 0;
  bool strangers = false;  ///< what lies beyond a sequence's keys may be anything

  // Of 8 bits only (S14).
  core::Scales q_scale, k_scale, v_scale, score_shift, v_shift;
  core::Divisor k_scale_block, v_scale_block;  ///< keys
  /// Blocks of keys after which sums are promoted, less 1. But for core::shares_scale(), which does
  /// not ask, a power of two: where a block's number has none of these bits.
  int promotion = 0;
  bool o_is_f16 = false;    ///< else bf16
  bool o_in_boxes = false;  ///< the copy engine can take o

  ptx::TensorMap o_map;  ///< where o_in_boxes: as q's, of kStagedRows rows

  TESSERA_HD constexpr bool copies_rows() const { return box_keys == 1; }
};

}  // namespace tessera::cuda::sm90
