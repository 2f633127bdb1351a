// The accessors of Plan and PlanData.
#include "plan/plan.h"

#include <algorithm>
#include <limits>

namespace tessera {

const Problem& Plan::problem() const { return data_->problem; }
const Device& Plan::device() const { return data_->device; }
std::string_view Plan::kernel() const { return data_->kernel_name; }
std::size_t Plan::workspace_bytes() const {
  constexpr std::uint64_t kMost = std::numeric_limits<std::size_t>::max();
  return static_cast<std::size_t>(std::min(data_->workspace_bytes, kMost));
}
std::vector<WorkspaceRegion> Plan::workspace_regions() const { return data_->regions; }
std::string Plan::explain() const { return tessera::explain(data_->problem, data_->device); }

}  // namespace tessera
