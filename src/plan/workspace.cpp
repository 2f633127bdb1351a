// The part of Workspace that only planning needs.
#include "plan/workspace.h"

namespace tessera {

void Workspace::record(const char* name, std::size_t offset, std::size_t bytes) {
  regions_->push_back({name, offset, bytes});
}

}  // namespace tessera
