// What the decoding kernel is given. Filled in by its launch, read by decode.h.
#pragma once

#include "core/divisor.h"
#include "core/mma_shape.h"
#include "core/prefixes.h"
#include "core/scales.h"
#include "core/score.h"
#include "core/spans.h"
#include "cuda/source.h"

namespace tessera::cuda::mma {

using core::kChunkBytes;
using core::kTileKeys;

/// Where blocks leave results of a part of the keys for each other.
struct DecodeParts {
  core::PartWord* words = nullptr;  ///< [slots][core::part_words]
  /// Whether every unit is a part and has a slot: [batch][heads][blocks][units]. Otherwise a span
  /// has one: of the item that began in an earlier span.
  bool by_unit = false;
  int blocks = 0;            ///< by_unit: of rows, of a head at most
  int units = 0;             ///< by_unit: of an item at most
  std::uint32_t ticket = 0;  ///< what no other run that may have left something there has; not 0
};

/// Of a row that reads shared prefixes once (core/prefixes.h), what a kernel before it has found,
/// and where blocks leave what rows see of a prefix: every row's own keys come last.
struct DecodePrefixes {
  const core::Segment* segments = nullptr;  ///< [count]
  const core::SegmentCount* count = nullptr;
  core::PartWord* rows = nullptr;  ///< [levels + 1][rows of q][num_heads][row's head_dim_v / 2]
  std::int64_t level_words = 0;    ///< from one level to the next
  core::Divisor seqlen_q;          ///< of dense queries
};

struct DecodeParams {
  Source q, k, v, qv;
  void* o = nullptr;
  core::Strides o_strides;
  float* softmax_lse = nullptr;  ///< may be null
  std::int64_t lse_head = 0;     ///< elements of softmax_lse from one head to the next

  core::Sequences sequences;
  core::Cache cache;
  core::Scales k_scale, v_scale;  ///< rows that widen: by tensor, head, token or group
  core::Divisor value_groups;     ///< of core::kScaledColumns, in a group of v
  Dtype dtype = Dtype::bf16;      ///< of q and o: rows that widen take both of 16 bits
  core::MaskRules mask;
  const float* sink = nullptr;  ///< null: no sink
  Extras extras;
  core::Score score;

  core::Spans spans;         ///< one a block; items are blocks of rows
  core::Divisor span_count;  ///< spans.count
  core::Divisor unit_tiles;  ///< of core::decode_tile_keys, of a unit
  DecodeParts parts;
  DecodePrefixes prefixes;
  bool looks_ahead = false;  ///< while grids before this one are not done

  int batch = 0, heads = 0;  ///< key/value heads, each as often as there are passes
  int passes = 1;            ///< over values: rows that take some columns at a time
  int num_heads = 0;
  core::Divisor group;      ///< query heads of a key/value head
  core::Divisor page_size;  ///< cache.pages.size
  int head_dim = 0, head_dim_v = 0;
};

template <int kSize>
struct CachedElement {
  using Type = std::uint16_t;
};
template <>
struct CachedElement<1> {
  using Type = std::uint8_t;
};
}  // namespace tessera::cuda::mma
