// Grids that follow each other. PTX ISA, "Parallel Synchronization and Communication Instructions".
#pragma once

namespace tessera::cuda::ptx {

/// This block of threads no longer stands in the way of a grid that was launched to begin before
/// this one ends (programmatic dependent launch). What that grid reads of this one's results it has
/// to wait for all the same. Without such a grid it does nothing.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace tessera::cuda::ptx
