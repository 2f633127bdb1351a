// The part of Workspace that only planning needs.
#include "plan/workspace.h"

namespace tessera {

void Workspace::record(const char* name, std::uint64_t offset, std::uint64_t bytes) {
  regions_->push_back({name, offset, bytes});
}

}  // namespace tessera
