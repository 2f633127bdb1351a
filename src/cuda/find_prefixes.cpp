#include "cuda/find_prefixes.h"

namespace tessera::cuda {

aux::FindPrefixesParams find_prefixes_params(const PlanData& plan, const Tensors& tensors,
                                             const GpuPrefixLayout& layout, std::uint32_t ticket) {
  const Problem& p = plan.problem;
  aux::FindPrefixesParams params;
  params.sequences = sequences_of(p, tensors);
  params.cache = cache_of(p, tensors);
  params.mask = mask_rules_of(p, tensors);
  params.rules = {.batch = static_cast<int>(p.batch),
                  .levels = static_cast<int>(p.cache->prefix_levels),
                  .heads = plan.work.heads,
                  .unit_n = plan.unit_n,
                  .spans = plan.spans,
                  .rows = {params.sequences.cu_seqlens_q, static_cast<int>(p.seqlen_q),
                           static_cast<int>(p.group()), plan.kernel.block_m}};
  params.common = layout.common;
  params.ticket = ticket;
  params.list = layout.list;
  params.own = layout.own;
  params.segments = layout.segments;
  params.count = layout.count;
  return params;
}

}  // namespace tessera::cuda
