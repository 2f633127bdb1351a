// What memory a GPU's kernels need besides shared memory and registers.
#pragma once

#include "core/prefixes.h"
#include "plan/plan.h"
#include "plan/shape.h"
#include "plan/workspace.h"

namespace tessera {

/// What the GPU's backward keeps between its kernels: see cuda/tile/backward_params.h.
struct GpuBackwardLayout {
  core::RowBlocks blocks;             ///< of rows of queries, of all sequences: B
  float* statistics = nullptr;        ///< [B][num_heads][2][block_m] what lse and delta become
  float* dq = nullptr;                ///< [B][num_heads][block_m][row's head_dim] accumulators
  std::int32_t* turns = nullptr;      ///< [B][num_heads][2] key blocks that have added
  float* sink_parts = nullptr;        ///< [num_heads][batch][blocks of a sequence]
  float* dbias = nullptr;             ///< [stored dimensions] sums, where scores share an element
  std::int32_t* next_tile = nullptr;  ///< pieces of work that have been handed out
  float* key_sums = nullptr;          ///< [work] of dV and dK, where pieces share keys
};

/// What a GPU's row that reads shared prefixes once knows of them (core/prefixes.h), and where it
/// leaves what rows see of each.
struct GpuPrefixLayout {
  std::uint64_t* common = nullptr;    ///< [batch] keys in common with the sequence before
  core::CommonKeys* list = nullptr;   ///< [batch]
  core::OwnKeys* own = nullptr;       ///< [batch]
  core::Segment* segments = nullptr;  ///< [2 batch] every sequence's own keys, then prefixes
  core::SegmentCount* count = nullptr;
  core::PartWord* rows = nullptr;  ///< [levels + 1][rows of q][num_heads][row's head_dim_v / 2]
};

/// Where the blocks of a GPU's decoding row leave parts for each other: see
/// cuda/mma/decode_params.h.
struct GpuDecodeLayout {
  std::int64_t slots = 0;           ///< none: an item has one part
  core::PartWord* words = nullptr;  ///< [slots][core::part_words]
  GpuPrefixLayout prefixes;
};

/// Units of the longest item of a decoding row at most; sink tokens begin a unit of their own.
TESSERA_HD std::int64_t units_of_item(const PlanData& plan) {
  const Problem& p = plan.problem;
  return core::max<std::int64_t>(1, core::ceil_div<std::int64_t>(p.seqlen_k, plan.unit_n)) +
         (p.sink_tokens > 0 ? 1 : 0);
}

/// What blocks of threads of a GPU's forward share: whose tiles are handed out as they get free.
struct GpuForwardLayout {
  std::int32_t* next_tile = nullptr;  ///< tiles that have been handed out, but every block's first
};

TESSERA_HD GpuForwardLayout layout_gpu_forward(Workspace& workspace, const PlanData& plan) {
  return {workspace.take<std::int32_t>("next_tile", hands_out_tiles(plan) ? 1 : 0)};
}

/// Where rows of v become tiles for a GPU's row that multiplies 8 bits (S14): as Tensors::v has
/// them, without gaps.
struct GpuValueLayout {
  core::ValueTiles tiles;
  std::int64_t batch_bytes = 0, head_bytes = 0;
  std::byte* data = nullptr;
};

TESSERA_HD GpuValueLayout layout_gpu_values(Workspace& workspace, const PlanData& plan) {
  const Problem& p = plan.problem;
  GpuValueLayout layout;
  layout.tiles = {plan.kernel.head_dim_v};
  layout.head_bytes = tiles_of_head(p) * layout.tiles.tile_bytes();
  layout.batch_bytes = p.num_heads_k * layout.head_bytes;
  layout.data =
      workspace.take<std::byte>("value_tiles", (p.packed ? 1 : p.batch) * layout.batch_bytes);
  return layout;
}

TESSERA_HD GpuPrefixLayout layout_gpu_prefixes(Workspace& workspace, const PlanData& plan) {
  const Problem& p = plan.problem;
  GpuPrefixLayout layout;
  layout.common = workspace.take<std::uint64_t>("common_keys", p.batch);
  layout.list = workspace.take<core::CommonKeys>("common_key_list", p.batch);
  layout.own = workspace.take<core::OwnKeys>("own_keys", p.batch);
  layout.segments = workspace.take<core::Segment>("segments", 2 * p.batch);
  layout.count = workspace.take<core::SegmentCount>("segment_count", 1);
  layout.rows = workspace.take<core::PartWord>(
      "prefix_words",
      (p.cache->prefix_levels + 1) * p.rows_q() * p.num_heads * (plan.kernel.head_dim_v / 2));
  return layout;
}

TESSERA_HD GpuDecodeLayout layout_gpu_decode(Workspace& workspace, const PlanData& plan) {
  const std::int64_t units = units_of_item(plan);
  GpuDecodeLayout layout;
  if (units > 1) {
    layout.slots =
        plan.problem.batch_invariant ? plan.work.count() * units : std::int64_t{plan.spans.count};
  }
  layout.words =
      workspace.take<core::PartWord>("part_words", layout.slots * core::part_words(plan.kernel));
  if (plan.kernel.prefixes) layout.prefixes = layout_gpu_prefixes(workspace, plan);
  return layout;
}

/// Whether the key blocks of a GPU's backward add their dQ in a fixed order: where they must (S9),
/// and where it is faster. Hardly anyone waits where sequences are not long, and who comes first
/// stores, so nothing is made 0 before (docs/performance.md).
TESSERA_HD bool adds_in_order(const PlanData& plan) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  if (p.deterministic || p.batch_invariant) return true;
  if (!core::begins_early(row) || plan.work.splits > 1 || p.window_left >= 0) return false;
  const bool small = row.head_dim <= 64;
  if (p.window_right < 0) return !p.packed && p.seqlen_k <= (small ? 2048 : 1024);
  const bool causal = p.window_right == 0 && p.seqlen_q == p.seqlen_k;
  return causal && p.seqlen_q <= (small || p.group() == 1 ? 4096 : 1024);
}

/// Elements of a bias tensor.
TESSERA_HD std::int64_t bias_elements(const Problem& p) {
  if (!p.bias) return 0;
  return (p.bias->batch ? p.batch : 1) * (p.bias->heads ? p.num_heads : 1) *
         (p.bias->queries ? p.seqlen_q : 1) * (p.bias->keys ? p.seqlen_k : 1);
}
/// Whether several scores share an element of the bias.
TESSERA_HD bool shares_bias(const Problem& p) {
  return p.bias && bias_elements(p) != p.batch * p.num_heads * p.seqlen_q * p.seqlen_k;
}

TESSERA_HD GpuBackwardLayout layout_gpu_backward(Workspace& workspace, const PlanData& plan) {
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  GpuBackwardLayout layout;
  layout.blocks = {kernel.block_m,
                   static_cast<int>(core::ceil_div<std::int64_t>(p.seqlen_q, kernel.block_m))};
  const std::int64_t blocks = layout.blocks.count(p.packed, p.rows_q(), p.batch) * p.num_heads;
  layout.statistics = workspace.take<float>("statistics", blocks * 2 * kernel.block_m);
  layout.dq = workspace.take<float>("dq", blocks * kernel.block_m * kernel.head_dim);
  layout.turns = workspace.take<std::int32_t>("turns", 2 * blocks);
  layout.sink_parts = workspace.take<float>(
      "sink_parts", p.sink ? p.num_heads * p.batch * layout.blocks.per_sequence : 0);
  layout.dbias = workspace.take<float>("dbias", shares_bias(p) ? bias_elements(p) : 0);
  layout.next_tile = workspace.take<std::int32_t>("next_tile", 1);
  layout.key_sums = workspace.take<float>(
      "key_sums", plan.work.splits > 1
                      ? plan.work.count() * kernel.block_n * (kernel.head_dim + kernel.head_dim_v)
                      : 0);
  return layout;
}

}  // namespace tessera
