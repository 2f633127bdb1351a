// In place of src/cuda/ptx/grid.h where kernels run on fibers (fibers.h): grids follow each other.
#pragma once

namespace tessera::cuda::ptx {

inline void launch_dependents() {}
inline void wait_for_grids() {}

}  // namespace tessera::cuda::ptx
