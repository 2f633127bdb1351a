// PlanData: what plan() decided and run() follows. Made once by select.cpp, then immutable.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "core/pages.h"
#include "core/scales.h"
#include "core/score.h"
#include "core/sequences.h"
#include "core/spans.h"
#include "core/value_tiles.h"
#include "core/work.h"
#include "tessera/tessera.hpp"

namespace tessera {

struct PlanData {
  Problem problem;
  Device device;
  core::Kernel kernel;
  std::string kernel_name;
  core::Score score;     ///< softmax_scale and softcap, folded to base 2
  core::WorkOrder work;  ///< its pieces; splits > 1: parts of keys (a GPU's backward: of the rows
                         ///< that see them), merged in their order
  int split_n = 0;       ///< keys per split, 0: not split
  core::Spans spans;     ///< a GPU's decoding row: of the items of `work`, one a block
  int unit_n = 0;        ///< the same: keys of an item's unit

  std::int64_t longest_keys = 0;  ///< that the rows of one sequence see, at most
  std::int64_t key_bytes = 0;     ///< of keys and values that all rows see, at most, each once

  /// Query heads that lie side by side on the row axis (core::Rows): a whole group, or one. A head
  /// of `work` is so many query heads.
  int row_heads = 1;
  std::uint64_t workspace_bytes = 0;
  std::vector<WorkspaceRegion> regions;
};

/// Lengths and places of a problem's sequences, and their masks; what lies in memory is read where
/// they are asked. With a cache: of the queries, and cache_of() of the keys, or of a cache as it is
/// given, given_cache().
TESSERA_HD core::Sequences sequences_of(const Problem& problem, const Tensors& tensors) {
  const std::int32_t* const keys = problem.cache ? tensors.cu_seqlens_q : tensors.cu_seqlens_k;
  return {problem.packed ? tensors.cu_seqlens_q : nullptr, problem.packed ? keys : nullptr,
          static_cast<int>(problem.seqlen_q), static_cast<int>(problem.seqlen_k)};
}
TESSERA_HD bool skips_pages(const Problem& problem) {
  return problem.cache && problem.cache->skips;
}
TESSERA_HD core::Cache given_cache(const Problem& problem, const Tensors& tensors) {
  if (!problem.cache) return {};
  const CacheShape& shape = *problem.cache;
  const CacheTensors& t = tensors.cache;
  core::Cache cache;
  cache.used = true;
  cache.seqlens = shape.lengths == Lengths::full ? nullptr : t.seqlens;
  cache.index = shape.rows > 0 ? t.index : nullptr;
  cache.leftpad = shape.leftpad ? t.leftpad : nullptr;
  cache.capacity = static_cast<int>(problem.seqlen_k);
  cache.rows = shape.rows;
  if (shape.lengths == Lengths::before) {
    cache.seqlen_new = static_cast<int>(shape.seqlen_new);
    if (problem.packed) cache.cu_seqlens_new = t.cu_seqlens_new;
  }
  if (shape.page_size > 0) {
    cache.pages = {t.page_table,    t.stride_page_table,
                   shape.num_pages, static_cast<int>(shape.page_size),
                   shape.page_ids,  shape.skips};
  }
  return cache;
}
/// As most kernels walk over it: where pages are skipped, those of `tensors` are the others
/// already, with lengths of their own (KeptPagesLayout).
TESSERA_HD core::Cache cache_of(const Problem& problem, const Tensors& tensors) {
  core::Cache cache = given_cache(problem, tensors);
  if (!skips_pages(problem)) return cache;
  cache.pages.skips = false;
  cache.seqlens = tensors.cache.seqlens;
  cache.cu_seqlens_new = nullptr;
  cache.seqlen_new = 0;
  cache.index = nullptr;
  return cache;
}
/// Whether pages that are not skipped must be listed before the kernel runs.
TESSERA_HD bool lists_pages(const PlanData& plan) {
  return skips_pages(plan.problem) && !core::hides_pages(plan.kernel);
}
/// As a plan's kernel walks over it.
TESSERA_HD core::Cache cache_of(const PlanData& plan, const Tensors& tensors) {
  return lists_pages(plan) ? cache_of(plan.problem, tensors) : given_cache(plan.problem, tensors);
}
TESSERA_HD core::Sequence sequence_of(const Problem& problem, const Tensors& tensors, int batch) {
  core::Sequence sequence = sequences_of(problem, tensors).at(batch);
  cache_of(problem, tensors).place(sequence);
  return sequence;
}
TESSERA_HD core::Sequence given_sequence(const Problem& problem, const Tensors& tensors,
                                         int batch) {
  core::Sequence sequence = sequences_of(problem, tensors).at(batch);
  given_cache(problem, tensors).place(sequence);
  return sequence;
}
TESSERA_HD core::Window window_of(const Problem& problem) {
  return {problem.window_left, problem.window_right, problem.alignment};
}
TESSERA_HD core::MaskRules mask_rules_of(const Problem& problem, const Tensors& tensors) {
  // No position is further from another than 2^30.
  constexpr std::int64_t kUnbounded = 1 << 30;
  return {window_of(problem), core::Divisor(static_cast<int>(core::min(problem.chunk, kUnbounded))),
          static_cast<int>(core::min(problem.sink_tokens, kUnbounded)),
          problem.tree ? tensors.tree_mask : nullptr};
}
TESSERA_HD core::Strides strides_of(const ConstTensor& tensor) {
  return {tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head};
}
/// AnyBias: ConstBias or Bias.
template <class AnyBias>
TESSERA_HD core::BiasStrides strides_of(const BiasShape& shape, const AnyBias& bias) {
  return {shape.batch ? bias.stride_batch : 0, shape.heads ? bias.stride_head : 0,
          shape.queries ? bias.stride_query : 0, shape.keys ? bias.stride_key : 0};
}
/// Scales and shifts, as the problem says that they are (S14).
/// @{
TESSERA_HD core::Scales scales_of(const ConstScales& numbers, Scaling by, std::int64_t block = 0) {
  return {numbers.data, numbers.stride_batch,    numbers.stride_head,
          by,           static_cast<int>(block), numbers.stride_seqlen};
}
TESSERA_HD core::Scales q_scales_of(const Problem& problem, const Tensors& tensors) {
  return scales_of(tensors.q_scale, problem.scales.q);
}
TESSERA_HD core::Scales k_scales_of(const Problem& problem, const Tensors& tensors) {
  return scales_of(tensors.k_scale, problem.scales.k, problem.scales.block_k);
}
TESSERA_HD core::Scales v_scales_of(const Problem& problem, const Tensors& tensors) {
  return scales_of(tensors.v_scale, problem.scales.v, problem.scales.block_v);
}
TESSERA_HD core::Scales score_shift_of(const Problem& problem, const Tensors& tensors) {
  return scales_of(tensors.score_shift,
                   problem.scales.score_shift ? Scaling::token : Scaling::none);
}
TESSERA_HD core::Scales v_shift_of(const Problem& problem, const Tensors& tensors) {
  return scales_of(tensors.v_shift, problem.scales.v_shift ? Scaling::channel : Scaling::none);
}
/// @}
/// How v lies in tiles, and bytes from its start to a sequence's first one of a key/value head.
/// @{
TESSERA_HD core::ValueTiles value_tiles_of(const Problem& problem) {
  return {core::ValueTiles::padded(static_cast<int>(problem.head_dim_v))};
}
TESSERA_HD std::int64_t value_tiles_offset(const core::ValueTiles& tiles, const ConstTensor& v,
                                           const core::Sequence& sequence, int head_k) {
  return sequence.entry_k * v.stride_batch + head_k * v.stride_head +
         core::ValueTiles::first_of(sequence) * tiles.tile_bytes();
}
/// @}
/// Tiles of one head's keys: of a sequence, packed of all.
TESSERA_HD std::int64_t tiles_of_head(const Problem& p) {
  return p.packed_k() ? core::ValueTiles::count_packed(p.total_k, p.batch)
                      : core::ValueTiles::count(p.seqlen_k);
}
/// Whether v lies in rows, and the plan's kernel wants tiles: they are made first, in the
/// workspace.
TESSERA_HD bool lays_values(const PlanData& plan) {
  return plan.kernel.operand == core::Operand::e4m3 && !plan.problem.v_tiles;
}
/// What a problem's scores need besides scale and mask; the least of the catalog's words for it.
TESSERA_HD core::Extra extra_of(const Problem& problem) {
  if (problem.bias || problem.alibi != PerHead::none || problem.dropout_p > 0.0F) {
    return core::Extra::all;
  }
  return problem.softcap > 0.0F ? core::Extra::softcap : core::Extra::none;
}
/// Elements of softmax_lse from one head to the next (S5).
inline std::int64_t lse_head_of(const Problem& problem) {
  return problem.packed ? problem.total_q : problem.seqlen_q;
}

enum class Memory : std::uint8_t { host, device };

/// Whether the tensors fit the problem: null pointers, strides, and cu_seqlens where it can be
/// read.
Status validate(const Problem& problem, const Tensors& tensors, Memory memory);

/// Whether the sizes make sense and the tensors fit them.
Status validate(const PartialResults& results, const PartialTensors& tensors);

}  // namespace tessera
