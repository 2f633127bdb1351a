// The accessors of Plan and PlanData.
#include "plan/plan.h"

namespace tessera {

const Problem& Plan::problem() const { return data_->problem; }
const Device& Plan::device() const { return data_->device; }
std::string_view Plan::kernel() const { return data_->kernel_name; }
std::size_t Plan::workspace_bytes() const { return data_->workspace_bytes; }
std::vector<WorkspaceRegion> Plan::workspace_regions() const { return data_->regions; }
std::string Plan::explain() const { return tessera::explain(data_->problem, data_->device); }

core::Sequence sequence_of(const Problem& problem, const Tensors& tensors, int batch) {
  if (!problem.packed) {
    return {static_cast<int>(problem.seqlen_q), static_cast<int>(problem.seqlen_k), 0, 0};
  }
  const std::int32_t* q = tensors.cu_seqlens_q + batch;
  const std::int32_t* k = tensors.cu_seqlens_k + batch;
  return {q[1] - q[0], k[1] - k[0], q[0], k[0]};
}

}  // namespace tessera
