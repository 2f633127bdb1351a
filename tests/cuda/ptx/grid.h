// In place of src/cuda/ptx/grid.h where a test runs a kernel on the host (cuda/host_threads.h).
#pragma once

#include <functional>

namespace tessera::cuda::ptx {

/// What the grids before this one do until they are done: every thread that waits for them calls
/// it.
inline std::function<void()> grids_before;

inline void launch_dependents() {}
inline void wait_for_grids() {
  if (grids_before) grids_before();
}

}  // namespace tessera::cuda::ptx
