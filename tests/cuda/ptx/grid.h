// In place of src/cuda/ptx/grid.h where a test runs a kernel on the host (cuda/host_threads.h).
#pragma once

namespace tessera::cuda::ptx {

inline void launch_dependents() {}

}  // namespace tessera::cuda::ptx
