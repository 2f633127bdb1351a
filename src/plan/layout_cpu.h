// What memory each form of CPU kernel needs: what its workers share, and the scratch of one.
#pragma once

#include "plan/plan.h"
#include "plan/workspace.h"

namespace tessera {

/// Partial results of split keys, merged by combine. A row here is (row of q over all sequences) *
/// num_heads + head.
struct SplitLayout {
  float* o = nullptr;    ///< [splits][rows][head_dim_v], normalised
  float* lse = nullptr;  ///< [splits][rows], natural log
};

TESSERA_HD SplitLayout layout_splits(Workspace& workspace, const PlanData& plan) {
  if (plan.work.splits <= 1) return {};
  const std::int64_t rows = plan.problem.rows_q() * plan.problem.num_heads * plan.work.splits;
  return {workspace.take<float>("split_o", rows * plan.problem.head_dim_v),
          workspace.take<float>("split_lse", rows)};
}

/// Elements between the rows of a copied block of values, fp32 or pairs of bf16: an odd number of
/// cache lines, so that rows do not fall into the same cache sets.
TESSERA_HD std::int64_t forward_value_stride(std::int64_t n) {
  return core::round_up<std::int64_t>(n, 16) | 16;
}
/// The same for keys, which stay bf16 for bf16 operands.
TESSERA_HD std::int64_t forward_key_stride(const core::Kernel& kernel, std::int64_t n) {
  return kernel.operand == core::Operand::bf16 ? 2 * forward_value_stride((n + 1) / 2)
                                               : forward_value_stride(n);
}

/// Where columns of qv and v follow those of q and k. No pair of bf16 has one of each: a zero ends
/// an odd head_dim.
TESSERA_HD std::int64_t second_column(const core::Kernel& kernel, const Problem& problem) {
  return core::round_up<std::int64_t>(problem.head_dim,
                                      kernel.operand == core::Operand::bf16 ? 2 : 1);
}

/// Columns that a product of queries and keys multiplies. A shift of scores is one more, where
/// every key has a 1.
TESSERA_HD std::int64_t multiplied_columns(const core::Kernel& kernel, const Problem& problem) {
  if (problem.qv) return second_column(kernel, problem) + problem.head_dim_v;
  return problem.head_dim + (problem.scales.score_shift ? 1 : 0);
}

/// Scratch of one worker of the forward tile kernel. L = tile_m lanes, M = block_m / L sub-tiles of
/// the work's block_m.
struct ForwardScratch {
  std::byte* q = nullptr;             ///< [M][columns][L] operands: Q transposed, bf16 in pairs
  float* o = nullptr;                 ///< [M][head_dim_v][L] accumulators: O transposed
  float* max = nullptr;               ///< [M][L] what is subtracted from a row's scores
  float* sum = nullptr;               ///< [M][L] running sum
  std::int32_t* query = nullptr;      ///< [M][L] a row's query
  std::int32_t* head = nullptr;       ///< [M][L] a row's query head
  std::int32_t* first_key = nullptr;  ///< [M][L] the keys a row sees
  std::int32_t* last_key = nullptr;   ///< [M][L] one past them
  std::uint32_t* tree = nullptr;      ///< [2][M][L] low and high halves of a row's word
  float* scores = nullptr;            ///< [block_n][L] scores, then weights
  float* waiting = nullptr;           ///< [16][L] raw products whose weights are not yet made
  float* bias = nullptr;              ///< [block_n][L]
  std::byte* k[2] = {};               ///< [block_n][key stride] where K's own rows do not serve:
                                      ///< of the block at work and of the next one
  std::byte* v[2] = {};               ///< [block_n][value stride]; bf16: [block_n / 2] pairs; fp32
                                      ///< with qv: none, k has them
};

TESSERA_HD ForwardScratch layout_forward_scratch(Workspace& workspace, const PlanData& plan) {
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  const bool pairs = kernel.operand == core::Operand::bf16;
  const std::int64_t m = plan.work.block_m, n = kernel.block_n, l = kernel.tile_m;
  const std::int64_t columns = multiplied_columns(kernel, p);
  const std::int64_t q_steps = pairs ? core::ceil_div<std::int64_t>(columns, 2) : columns;
  ForwardScratch s;
  s.q = workspace.take<std::byte>("q", m * q_steps * 4);
  s.o = workspace.take<float>("o", m * p.head_dim_v);
  s.max = workspace.take<float>("max", m);
  s.sum = workspace.take<float>("sum", m);
  s.query = workspace.take<std::int32_t>("query", m);
  s.head = workspace.take<std::int32_t>("head", m);
  s.first_key = workspace.take<std::int32_t>("first_key", m);
  s.last_key = workspace.take<std::int32_t>("last_key", m);
  s.tree = workspace.take<std::uint32_t>("tree", p.tree ? 2 * m : 0);
  s.scores = workspace.take<float>("scores", n * l);
  s.waiting = workspace.take<float>("waiting", 16 * l);
  s.bias = workspace.take<float>("bias", p.bias ? n * l : 0);
  const std::int64_t key_bytes = forward_key_stride(kernel, columns) * (pairs ? 2 : 4);
  const std::int64_t value_bytes = p.qv && !pairs ? 0 : forward_value_stride(p.head_dim_v) * 4;
  for (int i = 0; i < 2; ++i) {
    s.k[i] = workspace.take<std::byte>("k", n * key_bytes);
    s.v[i] = workspace.take<std::byte>("v", (pairs ? n / 2 : n) * value_bytes);
  }
  return s;
}

/// Columns of a step where bf16 meets bytes.
inline constexpr int kDecodeStepOfBytes = 64;
/// Elements between rows of n in decode scratch: whole steps of the widest multiply-add.
TESSERA_HD std::int64_t decode_row_stride(const PlanData& plan, std::int64_t n) {
  const bool bytes = plan.kernel.operand == core::Operand::bf16 && plan.problem.scaled();
  return bytes ? core::round_up<std::int64_t>(n, kDecodeStepOfBytes)
               : core::round_up<std::int64_t>(n, 32);
}

/// Elements between the queries of decode scratch: q's columns, then qv's.
TESSERA_HD std::int64_t decode_query_stride(const PlanData& plan) {
  const Problem& p = plan.problem;
  return decode_row_stride(plan, p.head_dim) + (p.qv ? decode_row_stride(plan, p.head_dim_v) : 0);
}

/// Keys or values of e4m3 that decoding widens at a time, and elements between their rows.
/// @{
inline constexpr int kDecodeWidenedKeys = 16;
TESSERA_HD std::int64_t decode_widened_stride(const Problem& problem) {
  return core::round_up<std::int64_t>(core::max(problem.head_dim, problem.head_dim_v), 64);
}
/// @}

/// Rows of one item of the decode kernel at most: those of one key/value head or of several.
TESSERA_HD constexpr int decode_rows(const core::Kernel& kernel) { return 2 * kernel.block_m; }

/// An item of the decode kernel has the key/value heads that lie between one key and the next, as
/// many as fit the scratch and leave every worker a few items. No result depends on it.
TESSERA_HD core::DecodeOrder decode_order(const PlanData& plan, const Tensors& t, int workers) {
  const Problem& p = plan.problem;
  core::DecodeOrder order = {plan.work.batch, plan.work.heads, plan.work.splits, 1};
  if (t.k.stride_head >= t.k.stride_seqlen || t.v.stride_head >= t.v.stride_seqlen) return order;
  constexpr std::int64_t kItemsOfWorker = 4;
  const std::int64_t items = plan.work.count() / (kItemsOfWorker * core::max(1, workers));
  const std::int64_t rows = core::max<std::int64_t>(1, p.seqlen_q * p.group());
  const std::int64_t heads = core::min(decode_rows(plan.kernel) / rows, items);
  order.width = static_cast<int>(core::max<std::int64_t>(1, core::min(p.num_heads_k, heads)));
  return order;
}

/// Scratch of one worker of the decode kernel. R = decode_rows.
struct DecodeScratch {
  float* q = nullptr;             ///< [R][columns], fp32 operands: scaled; bf16: as they are
  float* o = nullptr;             ///< [R][head_dim_v] accumulators
  float* scores = nullptr;        ///< [R][block_n] scores, then weights
  std::int64_t* slots = nullptr;  ///< [2][block_n] where keys and values lie in pages, in elements
  float* k_scales = nullptr;      ///< [block_n + 16] by token: of the keys at work
  float* v_scales = nullptr;      ///< [block_n + 16]
  std::uint16_t* widened = nullptr;  ///< [kDecodeWidenedKeys][decode_widened_stride] of e4m3: fp16,
                                     ///< for fp32 operands
};

TESSERA_HD DecodeScratch layout_decode_scratch(Workspace& workspace, const PlanData& plan) {
  const std::int64_t rows = decode_rows(plan.kernel);
  DecodeScratch s;
  s.q = workspace.take<float>("q", rows * decode_query_stride(plan));
  s.o = workspace.take<float>("o", rows * decode_row_stride(plan, plan.problem.head_dim_v));
  s.scores = workspace.take<float>("scores", rows * plan.kernel.block_n);
  const bool paged = plan.problem.cache && plan.problem.cache->page_size > 0;
  s.slots = workspace.take<std::int64_t>("slots", paged ? 2 * plan.kernel.block_n : 0);
  const auto scales = [&](const char* name, Scaling by) {
    return workspace.take<float>(name, by == Scaling::token ? plan.kernel.block_n + 16 : 0);
  };
  s.k_scales = scales("k_scales", plan.problem.scales.k);
  s.v_scales = scales("v_scales", plan.problem.scales.v);
  const bool widens =
      plan.kernel.operand == core::Operand::f32 && plan.problem.stored_k() == Dtype::e4m3;
  s.widened = workspace.take<std::uint16_t>(
      "widened", widens ? kDecodeWidenedKeys * decode_widened_stride(plan.problem) : 0);
  return s;
}

/// Scratch of one worker of the backward kernel. N = block_n keys, M = block_m rows, D and DV = the
/// head dims rounded up to whole vectors. "operands" are what multiplies: f32, or bf16 for bf16
/// rows.
struct BackwardScratch {
  float* p = nullptr;  ///< [N][M] scores, then P; f32 operands: then dS. bf16: for extra terms only
  std::byte* operand =
      nullptr;  ///< [N][M] P as it multiplies dO, where p itself does not serve; bf16: then dS
  std::uint32_t* pairs = nullptr;  ///< [N / 2][M] bf16 only: dS, two keys a word
  float* dp = nullptr;        ///< [N][M] dP, then dS before softcap: for scores with extra terms
  float* slope = nullptr;     ///< [N][M] softcap's derivative
  float* bias = nullptr;      ///< [N][M]
  float* bias_sum = nullptr;  ///< [N][max(M, group), in whole vectors] gradient of a broadcast bias
  std::byte* k = nullptr;     ///< [N][D] operands
  std::byte* v = nullptr;     ///< [N][DV] operands
  std::uint32_t* k_pairs = nullptr;  ///< [N / 2][D] bf16 only: two keys a word
  float* dk = nullptr;               ///< [N][D] accumulators
  float* dv = nullptr;               ///< [N][DV] accumulators
};

/// Tiles of a bias along batch, head_k, queries and keys, where its gradient is a pass of its own
/// (cpu/backward_bias.h): each is a task. Stored dimensions only.
struct BiasTiles {
  std::int64_t counts[4] = {0, 0, 0, 0};

  /// The largest number where it does not fit: a bias has more elements than any tensor may.
  TESSERA_HD std::int64_t count() const {
    std::int64_t product = 1;
    bool fits = true;
    for (const std::int64_t n : counts) {
      if (n == 0) return 0;
      fits = fits && !__builtin_mul_overflow(product, n, &product);
    }
    return fits ? product : INT64_MAX;
  }
};

TESSERA_HD BiasTiles bias_tiles(const Problem& p, const core::Kernel& kernel) {
  if (!p.bias) return {};
  const BiasShape& s = *p.bias;
  // A tile of a bias without heads is block_m queries of all heads: group tiles of rows.
  const std::int64_t rows = p.seqlen_q * (s.heads ? p.group() : 1);
  return {{s.batch ? p.batch : 1, s.heads ? p.num_heads_k : 1,
           s.queries ? core::ceil_div<std::int64_t>(rows, kernel.block_m) : 1,
           s.keys ? core::ceil_div<std::int64_t>(p.seqlen_k, kernel.block_n) : 1}};
}

/// Tasks of the backward proper, of one key/value head: tiles of rows to prepare, then blocks of
/// keys.
TESSERA_HD core::BackwardOrder backward_order(const Problem& p, const core::Kernel& kernel,
                                              std::int64_t workers) {
  return {p.batch * p.num_heads_k, core::max<std::int64_t>(1, workers),
          core::ceil_div<std::int64_t>(p.seqlen_q * p.group(), kernel.block_m),
          core::ceil_div<std::int64_t>(p.seqlen_k, kernel.block_n)};
}

/// Workers of a CPU's plan that can have work at the same time: the device's, but no more than the
/// longest phase with scratch has tasks (cpu/call.h gives nobody more).
TESSERA_HD std::int64_t workers_of(const PlanData& plan) {
  std::int64_t tasks = plan.work.count();
  if (plan.problem.pass == Pass::backward) {
    tasks = core::max(backward_order(plan.problem, plan.kernel, 1).count(),
                      bias_tiles(plan.problem, plan.kernel).count());
  }
  return core::max<std::int64_t>(1, core::min<std::int64_t>(plan.device.threads, tasks));
}

/// What all workers of the backward share. Rows are grouped per (batch, head_k) as core/work.h
/// says; each sequence starts at a multiple of tile_m, and the rows up to the next multiple repeat
/// its last. What is large is kept only for the heads in flight, each in a slot of S rows, enough
/// for any sequence. A word is an f32, or a pair of bf16 for bf16 rows.
struct BackwardLayout {
  std::int64_t rows = 0;             ///< of one head_k, all sequences: R
  std::int64_t slot_rows = 0;        ///< S
  float* shift = nullptr;            ///< [heads_k][R] core::backward_shift of lse
  float* delta = nullptr;            ///< [heads_k][R] rowsum(do * o) - dlse
  std::int32_t* prepared = nullptr;  ///< [batch][heads_k] tiles of rows that are copied
  std::int32_t* finished = nullptr;  ///< [batch][heads_k] key blocks that are done
  std::int32_t* turns = nullptr;     ///< [slots][S / tile_m] key blocks that have added their dq
  std::byte* q = nullptr;            ///< [slots][S][D] words; bf16: pairs of rows
  std::byte* q_transposed =
      nullptr;                ///< [slots][S / tile_m][D][tile_m] words; bf16: pairs of columns
  std::byte* dout = nullptr;  ///< [slots][S][DV]
  std::byte* dout_transposed = nullptr;  ///< [slots][S / tile_m][DV][tile_m]
  float* dq = nullptr;                   ///< [slots][S][D] accumulators
};

/// First row of a sequence among those of its head_k, given the first query of all sequences
/// together: a multiple of tile_m, with room for every sequence rounded up to whole tiles. `batch`
/// sequences and all their queries: the rows of a head_k altogether.
TESSERA_HD std::int64_t backward_row(const PlanData& plan, std::int64_t query, std::int64_t batch) {
  const std::int64_t tile = plan.kernel.tile_m;
  return (query * plan.problem.group() / tile + batch) * tile;
}

TESSERA_HD BackwardScratch layout_backward_scratch(Workspace& workspace, const PlanData& plan) {
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  const bool bf16 = kernel.operand == core::Operand::bf16;
  const bool dropout = p.dropout_p > 0.0F;
  const bool extra = extra_of(p) != core::Extra::none;
  const std::int64_t m = kernel.block_m, n = kernel.block_n, size = bf16 ? 2 : 4;
  const std::int64_t d = core::round_up<std::int64_t>(p.head_dim, kernel.lanes);
  const std::int64_t dv = core::round_up<std::int64_t>(p.head_dim_v, kernel.lanes);
  BackwardScratch s;
  s.p = workspace.take<float>("p", !bf16 || extra ? n * m : 0);
  s.operand = workspace.take<std::byte>("operand", bf16 || dropout ? n * m * size : 0);
  s.pairs = workspace.take<std::uint32_t>("pairs", bf16 ? n / 2 * m : 0);
  s.dp = workspace.take<float>("dp", extra ? n * m : 0);
  s.slope = workspace.take<float>("slope", p.softcap > 0.0F ? n * m : 0);
  s.bias = workspace.take<float>("bias", p.bias ? n * m : 0);
  s.bias_sum = workspace.take<float>(
      "bias_sum",
      p.bias ? n * core::round_up<std::int64_t>(core::max(m, p.group()), kernel.lanes) : 0);
  s.k = workspace.take<std::byte>("k", n * d * size);
  s.v = workspace.take<std::byte>("v", n * dv * size);
  s.k_pairs = workspace.take<std::uint32_t>("k_pairs", bf16 ? n / 2 * d : 0);
  s.dk = workspace.take<float>("dk", n * d);
  s.dv = workspace.take<float>("dv", n * dv);
  return s;
}

TESSERA_HD BackwardLayout layout_backward(Workspace& workspace, const PlanData& plan) {
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  const std::int64_t size = kernel.operand == core::Operand::bf16 ? 2 : 4;
  const std::int64_t d = core::round_up<std::int64_t>(p.head_dim, kernel.lanes);
  const std::int64_t dv = core::round_up<std::int64_t>(p.head_dim_v, kernel.lanes);
  const std::int64_t heads = p.batch * p.num_heads_k;
  // One wave of heads, one head a worker, and the next; a broadcast bias has tasks with rows of
  // their own.
  const std::int64_t threads = plan.device.threads;
  const std::int64_t slots =
      core::max(core::min(heads, 2 * threads), core::min(threads, bias_tiles(p, kernel).count()));
  BackwardLayout layout;
  layout.rows = backward_row(plan, p.rows_q(), p.batch);
  layout.slot_rows = core::round_up<std::int64_t>(p.seqlen_q * p.group(), kernel.tile_m);
  const std::int64_t rows = slots * layout.slot_rows;
  layout.shift = workspace.take<float>("shift", p.num_heads_k * layout.rows);
  layout.delta = workspace.take<float>("delta", p.num_heads_k * layout.rows);
  layout.prepared = workspace.take<std::int32_t>("prepared", heads);
  layout.finished = workspace.take<std::int32_t>("finished", heads);
  layout.turns = workspace.take<std::int32_t>("turns", rows / kernel.tile_m);
  layout.q = workspace.take<std::byte>("q", rows * d * size);
  layout.q_transposed = workspace.take<std::byte>("q_transposed", rows * d * size);
  layout.dout = workspace.take<std::byte>("dout", rows * dv * size);
  layout.dout_transposed = workspace.take<std::byte>("dout_transposed", rows * dv * size);
  layout.dq = workspace.take<float>("dq", rows * d);
  return layout;
}

/// Bytes that one worker's scratch takes, whatever the form.
inline std::int64_t scratch_bytes(const PlanData& plan,
                                  std::vector<WorkspaceRegion>* regions = nullptr) {
  Workspace counter(regions);
  if (plan.problem.pass == Pass::backward) {
    layout_backward_scratch(counter, plan);
  } else if (plan.kernel.form == core::Form::decode) {
    layout_decode_scratch(counter, plan);
  } else {
    layout_forward_scratch(counter, plan);
  }
  return static_cast<std::int64_t>(counter.bytes());
}

}  // namespace tessera
