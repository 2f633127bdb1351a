// What the forward kernel of mma.sync is given: one value, read by forward.h.
#pragma once

#include "core/divisor.h"
#include "core/pages.h"
#include "core/philox.h"
#include "core/score.h"
#include "core/sequences.h"
#include "core/work.h"
#include "cuda/source.h"

namespace tessera::cuda::mma {

struct ForwardParams {
  Source q, k, v;  ///< rows of 16 bits, each at a multiple of 16 bytes, but for .any rows

  void* o = nullptr;
  core::Strides o_strides;
  float* softmax_lse = nullptr;  ///< may be null
  std::int64_t lse_head = 0;     ///< elements of softmax_lse from one head to the next

  core::Sequences sequences;
  core::Window window;
  const float* sink = nullptr;  ///< null: no sink
  Extras extras;
  core::Score score;
  core::SoftcapSeries series;
  core::Dropout dropout;

  core::WorkOrder work;
  core::ShiftedRows rows;  ///< of a tile: of one query head, or of a group's
  int group = 1;           ///< heads of `work` that share keys
  int head_dim = 0, head_dim_v = 0;

  core::Cache cache;
  core::Divisor page_size;  ///< of the cache's pages
  bool alike = false;       ///< strides of keys are those of values
};

}  // namespace tessera::cuda::mma
