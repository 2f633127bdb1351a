#include "cuda/lay_values.h"

#include <cstdint>
#include <string>

#include "cuda/maps.h"
#include "plan/layout.h"

namespace tessera::cuda {

aux::LayValuesParams lay_values_params(const PlanData& plan, const Tensors& tensors,
                                       const GpuValueLayout& layout) {
  const Problem& p = plan.problem;
  aux::LayValuesParams params;
  params.sequences = sequences_of(p, tensors);
  params.pieces = {params.sequences.cu_seqlens_k, static_cast<int>(p.seqlen_k),
                   static_cast<int>(p.batch), core::ValueTiles::kKeys};
  params.heads = core::Divisor(static_cast<int>(p.num_heads_k));
  params.from = {tensors.v.data, strides_between(tensors.v, row_sizes(p, false))};
  params.to = layout.data;
  params.to_strides = {layout.batch_bytes, 0, layout.head_bytes};
  params.tiles = layout.tiles;
  params.groups = core::Divisor(core::ceil_div(layout.tiles.columns, aux::kLayColumns));
  params.dim = static_cast<int>(p.head_dim_v);
  params.blocks = params.pieces.count(p.total_k) * p.num_heads_k * params.groups.value();
  return params;
}

Status lay_values(const PlanData& plan, Tensors& tensors, void* workspace, const Queue& queue) {
  const Problem& p = plan.problem;
  if (Status s = check_aligned("v", tensors.v, p, p.stored_v(), false); !s) return s;
  Workspace memory(workspace);
  const GpuValueLayout layout = tessera::layout(memory, plan).gpu_values;
  const aux::LayValuesParams params = lay_values_params(plan, tensors, layout);
  tensors.v = {layout.data, layout.batch_bytes, 0, layout.head_bytes};
  if (row_sizes(p, false).empty()) return {};
  if (params.blocks > INT32_MAX) {
    return Status::device("v: rows become tiles by " + std::to_string(params.blocks) +
                          " blocks of threads; up to " + std::to_string(INT32_MAX) +
                          " are one launch");
  }
  return queue.launch_auxiliary(number_of(AuxiliaryKernel::lay_values), params.blocks, &params);
}

}  // namespace tessera::cuda
