// Loads and stores: the bulk tensor copy engine (TMA) and predicated global stores. PTX ISA, "Data
// Movement and Conversion Instructions".
#pragma once

#include <cstdint>

#include "cuda/ptx/tensor_map.h"

namespace tessera::cuda::ptx {

/// Copies the box at `coordinates` of a four-dimensional tensor to shared memory; elements outside
/// the tensor become 0. Completes on the mbarrier.
__device__ __forceinline__ void tma_load(std::uint32_t to, const TensorMap& map,
                                         std::uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Predicated, not branched around: after a branch inside a loop the compiler no longer keeps what
// is the same for the whole warp in uniform registers, where wgmma wants its descriptors.

__device__ __forceinline__ void store_if(bool condition, void* to, std::uint32_t a,
                                         std::uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n"
      "@p st.global.v2.b32 [%1], {%2, %3};\n}\n" ::"r"(static_cast<int>(condition)),
      "l"(to), "r"(a), "r"(b)
      : "memory");
}
__device__ __forceinline__ void store_if(bool condition, float* to, float x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.f32 [%1], %2;\n}\n" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "f"(x)
               : "memory");
}

__device__ __forceinline__ void store_if(bool condition, std::uint16_t* to, std::uint16_t x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.b16 [%1], %2;\n}\n" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "h"(x)
               : "memory");
}

}  // namespace tessera::cuda::ptx
