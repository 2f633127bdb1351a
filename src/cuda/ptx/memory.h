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
/// Copies `bytes` (a multiple of 16, as are the addresses) to shared memory. Completes on the
/// mbarrier.
__device__ __forceinline__ void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// The same; policy: of the second-level cache (cache_policy()).
__device__ __forceinline__ void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
/// Adds fp32 of shared memory to those of global memory, or stores them there; `bytes` and
/// addresses as above. Part of the thread's bulk group.
__device__ __forceinline__ void bulk_add(float* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_store(float* to, std::uint32_t from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
/// Copies a box to a four-dimensional tensor, but for what lies outside. Part of the thread's bulk
/// group. If a condition holds: a branch of one lane would part it from its warp.
__device__ __forceinline__ void tma_store_if(bool condition, const TensorMap& map,
                                             std::uint32_t from, int c0, int c1, int c2, int c3) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n"
      "@p cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%3, %4, %5, %6}], [%2];\n}"
      "\n" ::"r"(static_cast<int>(condition)),
      "l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until what this thread's bulk groups read from shared memory has been read.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's bulk groups are done, but for the last kPending.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four matrices of 8 x 8 16-bit elements; lane 8 i + r gives the address of the i-th one's row r
/// and gets two elements of row lane / 4 of each.
__device__ __forceinline__ void load_matrices(std::uint32_t* words, std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void store_shared(std::uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, std::uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t to, std::int64_t number) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(number) : "memory");
}
__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t from) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ __forceinline__ void load_shared(std::uint32_t from, std::int64_t& number) {
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(number) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t from, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t from, float& a, float& b, float& c,
                                            float& d) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
               : "r"(from)
               : "memory");
}
/// A word of global memory by which blocks tell each other how far they are: what was written
/// before it was stored is seen after it has been loaded.
__device__ __forceinline__ int load_acquire(const std::int32_t* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ std::uint64_t load_acquire(const std::uint64_t* from) {
  std::uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(std::int32_t* to, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void add_release(std::int32_t* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
/// Without order: whoever has seen what he waited for goes on after fence_gpu().
__device__ __forceinline__ std::uint64_t load_relaxed(const std::uint64_t* from) {
  std::uint64_t x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ std::int32_t load_relaxed(const std::int32_t* from) {
  std::int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ std::int64_t load_relaxed(const std::int64_t* from) {
  std::int64_t x;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
/// 16 bytes that come and go as one.
__device__ __forceinline__ uint4 load_relaxed(const uint4* from) {
  uint4 x;
  asm volatile(
      "{\n.reg .b128 word;\n.reg .b64 low, high;\n"
      "ld.relaxed.gpu.global.b128 word, [%4];\n"
      "mov.b128 {low, high}, word;\n"
      "mov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from)
      : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed(uint4* to, const uint4& x) {
  asm volatile(
      "{\n.reg .b128 word;\n.reg .b64 low, high;\n"
      "mov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\n"
      "mov.b128 word, {low, high};\n"
      "st.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}
__device__ __forceinline__ void store_relaxed(std::uint64_t* to, std::uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
/// Asks the second-level cache for `bytes`, a multiple of 16, as is the address. Changes nothing
/// that anybody could read.
__device__ __forceinline__ void prefetch(const void* from, std::uint32_t bytes,
                                         std::uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from),
               "r"(bytes), "l"(policy)
               : "memory");
#else
  constexpr std::uint32_t kLine = 128;
  for (std::uint32_t i = 0; i < bytes; i += kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + i) : "memory");
  }
#endif
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void store_release(std::uint64_t* to, std::uint64_t x) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
/// Stores four 8 x 8 matrices of 16-bit elements: register i of the warp's threads is matrix i, and
/// lane l names where row l % 8 of matrix l / 8 goes. A thread's word holds columns 2 (lane % 4)
/// and the next of row lane / 4.
__device__ __forceinline__ void store_matrices(std::uint32_t to, const std::uint32_t* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
/// Four neighbouring fp32 of global memory grow; nobody waits for it.
__device__ __forceinline__ void add_global(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}
/// The same, or, where they are not to be kept, stores.
/// @{
__device__ __forceinline__ void add_global_or_store(bool store, float* to, float x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n"
      "@p st.global.f32 [%1], %2;\n"
      "@!p red.relaxed.gpu.global.add.f32 [%1], %2;\n}\n" ::"r"(static_cast<int>(store)),
      "l"(to), "f"(x)
      : "memory");
}
__device__ __forceinline__ void add_global_or_store(bool store, float* to, float a, float b,
                                                    float c, float d) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n"
      "@p st.global.v4.f32 [%1], {%2, %3, %4, %5};\n"
      "@!p red.relaxed.gpu.global.add.v4.f32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(
          static_cast<int>(store)),
      "l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}
/// @}

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
__device__ __forceinline__ void store_if(bool condition, std::uint32_t* to, std::uint32_t x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.b32 [%1], %2;\n}\n" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "r"(x)
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

/// What lies there, or 0. Of memory that nobody writes meanwhile: loads may change their order, so
/// that they are under way together.
__device__ __forceinline__ float load_if(bool condition, const float* from) {
  float x;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\nmov.f32 %0, 0f00000000;\n"
      "@p ld.global.nc.f32 %0, [%2];\n}\n"
      : "=f"(x)
      : "r"(static_cast<int>(condition)), "l"(from));
  return x;
}
/// The same where there are no registers for many loads under way: they keep their order.
__device__ __forceinline__ float load_in_order_if(bool condition, const float* from) {
  float x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\nmov.f32 %0, 0f00000000;\n"
      "@p ld.global.nc.f32 %0, [%2];\n}\n"
      : "=f"(x)
      : "r"(static_cast<int>(condition)), "l"(from));
  return x;
}
__device__ __forceinline__ std::uint32_t load_if(bool condition, const std::uint32_t* from) {
  std::uint32_t x;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\nmov.b32 %0, 0;\n"
      "@p ld.global.nc.b32 %0, [%2];\n}\n"
      : "=r"(x)
      : "r"(static_cast<int>(condition)), "l"(from));
  return x;
}
__device__ __forceinline__ std::uint16_t load_if(bool condition, const std::uint16_t* from) {
  std::uint16_t x;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\nmov.b16 %0, 0;\n"
      "@p ld.global.nc.b16 %0, [%2];\n}\n"
      : "=h"(x)
      : "r"(static_cast<int>(condition)), "l"(from));
  return x;
}

}  // namespace tessera::cuda::ptx
