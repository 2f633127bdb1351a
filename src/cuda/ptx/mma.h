// mma.sync: D (16 x 8, fp32, registers of a warp) += A (16 x 16) B (16 x 8), from registers; and
// how operands get there: cp.async and ldmatrix. PTX ISA, "Matrix Fragments for mma.m16n8k16".
//
// Turing (7.5) has neither bf16 nor cp.async, and products of 8 columns: there a product is two,
// and a copy is done when the thread goes on.
//
// D of lane t: row t / 4 in d[0] and d[1], row t / 4 + 8 in d[2] and d[3], columns 2 (t % 4) and
// the next one: the layout of wgmma's accumulators (wgmma.h), so what works on those works on
// these.
#pragma once

#include <cstdint>

#include "tessera/types.hpp"

namespace tessera::cuda::ptx {

template <Dtype kType>
__device__ __forceinline__ void mma(float* d, const std::uint32_t* a, std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (kType == Dtype::bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(kType == Dtype::f16);
#if __CUDA_ARCH__ < 800
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(i == 0 ? b0 : b1));
    }
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
  }
}

/// Four matrices of 8 x 8 16-bit elements, each transposed; lane 8 i + r gives the address of the
/// i-th one's row r and gets rows 2 (lane % 4) and the next of column lane / 4 of each.
__device__ __forceinline__ void load_matrices_across(std::uint32_t* words, std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}

/// What becomes of lines in the second-level cache.
using CachePolicy = std::uint64_t;
/// once: they give way first, so what else lies there stays.
__device__ __forceinline__ CachePolicy cache_policy([[maybe_unused]] bool once) {
#if __CUDA_ARCH__ < 800
  return 0;
#else
  CachePolicy first, as_usual;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(as_usual));
  return once ? first : as_usual;
#endif
}

#if __CUDA_ARCH__ < 800

// Loads of memory that nobody writes meanwhile: they may be under way together, before what stores
// the first of them.

/// Copies 16 bytes to shared memory, or zeros if not `exists`.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool exists) {
  std::uint32_t x[4];
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%5];\n}\n"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "r"(static_cast<int>(exists)), "l"(from));
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool exists,
                                           CachePolicy /*policy*/) {
  copy_async(to, from, exists);
}
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from,
                                           CachePolicy /*policy*/) {
  copy_async(to, from, true);
}
/// The same of a word.
__device__ __forceinline__ void copy_async_word(std::uint32_t to, const void* from, bool exists) {
  std::uint32_t x;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\nmov.b32 %0, 0;\n"
      "@p ld.global.nc.b32 %0, [%2];\n}\n"
      : "=r"(x)
      : "r"(static_cast<int>(exists)), "l"(from));
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void copy_commit() {}
template <int kPending>
__device__ __forceinline__ void copy_wait() {}

#else

/// Copies 16 bytes to shared memory, or zeros if not `exists`. Part of the thread's group of
/// copies.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, bool exists,
                                           CachePolicy policy) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}
/// The same of what exists.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, CachePolicy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
}
/// The same of a word.
__device__ __forceinline__ void copy_async_word(std::uint32_t to, const void* from, bool exists) {
  const int bytes = exists ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Arrives at the mbarrier once all copies that this thread has asked for are done.
__device__ __forceinline__ void copy_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Waits until this thread's groups of copies are done, but for the last kPending.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif

}  // namespace tessera::cuda::ptx
