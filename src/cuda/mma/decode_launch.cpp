// From a plan that decodes and tensors to a launch.
#include "cuda/mma/decode_launch.h"

#include <atomic>
#include <random>

#include "cuda/find_prefixes.h"
#include "cuda/maps.h"
#include "cuda/mma/decode_params.h"
#include "plan/alignment.h"
#include "plan/layout.h"

namespace tessera::cuda::mma {
namespace {

/// A run's own number: a block that waits for parts in a workspace that holds anything must not
/// take that for one. Whoever has waited leaves a 0, so a graph may replay a run.
std::uint32_t next_ticket() {
  static std::atomic<std::uint32_t> next{std::random_device()()};
  std::uint32_t ticket = next.fetch_add(1, std::memory_order_relaxed);
  while (ticket == 0) ticket = next.fetch_add(1, std::memory_order_relaxed);
  return ticket;
}

DecodeParams make_params(const PlanData& plan, const Tensors& t, const GpuDecodeLayout& layout,
                         std::uint32_t ticket) {
  const Problem& p = plan.problem;
  DecodeParams params;
  params.q = source_of(t.q);
  params.k = source_of(t.k);
  params.v = source_of(t.v);
  params.qv = source_of(t.qv);
  set_forward(params, plan, t);
  params.k_scale = k_scales_of(p, t);
  params.v_scale = v_scales_of(p, t);
  params.value_groups =
      core::Divisor(core::max(static_cast<int>(p.scales.block_v) / core::kScaledColumns, 1));
  params.dtype = p.dtype;
  params.spans = plan.spans;
  params.span_count = core::Divisor(plan.spans.count);
  params.unit_tiles = core::Divisor(plan.unit_n / core::decode_tile_keys(plan.kernel));
  params.parts = {layout.words, p.batch_invariant, plan.work.blocks,
                  static_cast<int>(units_of_item(plan)), ticket};
  // Whatever lengths and tables say before they are written, no key lies outside of a cache; packed
  // queries could.
  params.looks_ahead = p.cache && !p.packed && !plan.kernel.prefixes;
  params.batch = static_cast<int>(p.batch);
  params.heads = plan.work.heads;
  params.passes = core::value_passes(plan.kernel, static_cast<int>(p.head_dim_v));
  params.num_heads = static_cast<int>(p.num_heads);
  params.group = core::Divisor(static_cast<int>(p.group()));
  params.page_size = core::Divisor(params.cache.pages.size);
  if (plan.kernel.prefixes) {
    const GpuPrefixLayout& prefixes = layout.prefixes;
    params.prefixes = {prefixes.segments, prefixes.count, prefixes.rows,
                       p.rows_q() * p.num_heads * (plan.kernel.head_dim_v / 2),
                       core::Divisor(static_cast<int>(p.seqlen_q))};
  }
  return params;
}

Status check_all(const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  Status status = check_aligned("q", t.q, p, p.dtype, true);
  if (status && p.qv) status = check_aligned("qv", t.qv, p, p.dtype, true);
  if (status) status = check_aligned("k", t.k, p, p.stored_k(), false);
  if (status) status = check_aligned("v", t.v, p, p.stored_v(), false);
  if (status) status = check_aligned("o", t.o, p, p.dtype, true);
  return status;
}

}  // namespace

Status run_decode(const PlanData& plan, const Tensors& tensors, void* workspace,
                  const Queue& queue) {
  if (plan.work.count() == 0) return {};
  if (Status s = check_all(plan, tensors); !s) return s;
  const std::uint32_t ticket = next_ticket();
  Workspace memory(workspace);
  const GpuDecodeLayout decode = layout(memory, plan).gpu_decode;
  if (plan.kernel.prefixes) {
    const aux::FindPrefixesParams find =
        find_prefixes_params(plan, tensors, decode.prefixes, ticket);
    if (Status s = queue.launch_auxiliary(number_of(AuxiliaryKernel::find_prefixes),
                                          plan.problem.batch, &find);
        !s) {
      return s;
    }
  }
  const DecodeParams params = make_params(plan, tensors, decode, ticket);
  return queue.launch(plan.kernel, plan.spans.count, &params);
}

}  // namespace tessera::cuda::mma
