// Launches that overlap: a kernel may begin while the one before it in the stream still runs. PTX ISA,
// "griddepcontrol"; nothing before compute capability 9.0, where no launch overlaps.
#pragma once

namespace tessera::cuda::ptx {

/// Returns once all that was launched before is done, and seen.
__device__ __forceinline__ void wait_for_launches_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// The next launch may begin, if it is one that waits, once all blocks have said so.
__device__ __forceinline__ void let_next_launch_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace tessera::cuda::ptx
