// Grids that follow each other. PTX ISA, "Parallel Synchronization and Communication Instructions".
// Of GPUs before 9.0, and of what is compiled for all, no grid begins before another has ended.
#pragma once

namespace tessera::cuda::ptx {

/// This block of threads no longer stands in the way of a grid that was launched to begin before
/// this one ends (programmatic dependent launch). What that grid reads of this one's results it has
/// to wait for all the same. Without such a grid it does nothing.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the grids before this one are done and all they wrote is there. Before that, a grid
/// that was launched to begin early may touch nothing that they do.
__device__ __forceinline__ void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tessera::cuda::ptx
