// wgmma: D (64 x N, fp32, registers of a warpgroup) += A (64 x 16) B (16 x N). PTX ISA,
// "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
// D of thread t (of 128): row 16 (t / 32) + t % 32 / 4 in d[4 c] and d[4 c + 1], the row eight
// further in d[4 c + 2] and d[4 c + 3], columns 8 c + 2 (t % 4) and the next one.
//
// Shared operands lie in the 128-byte swizzle: columns in chunks of 64 (128 bytes), rows of a chunk
// one after another, the 16-byte unit u of row r at u ^ (r % 8).
#pragma once

#include <cstdint>

#include "tessera/types.hpp"

namespace tessera::cuda::ptx {

/// Orders registers written before against the wgmma instructions after.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Ends a group of wgmma instructions.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kGroups groups are unfinished.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
/// Keeps the compiler from using accumulators before the wait above it.
template <int kCount>
__device__ __forceinline__ void wgmma_results(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Low word of the matrix descriptor of a shared operand whose rows run along the summed dimension
/// (Q, K). Adding bytes / 16 moves the operand, which costs one instruction where making a new
/// descriptor from an address costs five.
__device__ __forceinline__ std::uint32_t descriptor_along(std::uint32_t address) {
  return address >> 4 | 1U << 16;
}
/// The same for rows that run across it (V); chunk_bytes: from one chunk of 64 columns to the next.
__device__ __forceinline__ std::uint32_t descriptor_across(std::uint32_t address,
                                                           std::uint32_t chunk_bytes) {
  return address >> 4 | chunk_bytes >> 4 << 16;
}
/// The whole descriptor: eight rows are 1024 bytes, in the 128-byte swizzle.
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t low) {
  constexpr std::uint64_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
  return low | kEightRows << 32 | kSwizzle128 << 62;
}

/// Low word, and all, of the descriptor of value tiles' panel (core/value_tiles.h): rows of 32
/// bytes along the summed dimension, eight of which are 256 bytes, in the 32-byte swizzle.
__device__ __forceinline__ std::uint32_t descriptor_of_panel(std::uint32_t address) {
  return address >> 4 | 1U << 16;
}
__device__ __forceinline__ std::uint64_t panel_descriptor(std::uint32_t low) {
  constexpr std::uint64_t kEightRows = 256 >> 4, kSwizzle32 = 3;
  return low | kEightRows << 32 | kSwizzle32 << 62;
}

/// D = A B, or D += A B if `add`. shared: A and B by descriptors, along; shared_across: both
/// across, A's rows being those of the summed dimension, too; registers: A as four registers a
/// thread (the layout of D, two neighbouring groups of columns in pairs), B along;
/// registers_across: B across. Of e4m3 A is 64 x 32 and B 32 x N, both along; in registers the
/// columns of 16 stand as core::ValueTiles::place_of() says. Of i8 the same, and D holds the bits
/// of int32, which are exact sums.
template <Dtype kType, int kN>
struct Wgmma;

// clang-format off
#define TESSERA_R8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define TESSERA_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TESSERA_FIRST8(d) TESSERA_R8(d, 0)
#define TESSERA_R16(d) TESSERA_R8(d, 0), TESSERA_R8(d, 8)
#define TESSERA_R32(d) TESSERA_R16(d), TESSERA_R8(d, 16), TESSERA_R8(d, 24)
#define TESSERA_R40(d) TESSERA_R32(d), TESSERA_R8(d, 32)
#define TESSERA_R48(d) TESSERA_R40(d), TESSERA_R8(d, 40)
#define TESSERA_R64(d) TESSERA_R48(d), TESSERA_R8(d, 48), TESSERA_R8(d, 56)
#define TESSERA_R96(d) TESSERA_R64(d), TESSERA_R8(d, 64), TESSERA_R8(d, 72), TESSERA_R8(d, 80), TESSERA_R8(d, 88)
#define TESSERA_R128(d) TESSERA_R96(d), TESSERA_R8(d, 96), TESSERA_R8(d, 104), TESSERA_R8(d, 112), TESSERA_R8(d, 120)
#define TESSERA_S8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TESSERA_S16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_S32 TESSERA_S16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_S40 TESSERA_S32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TESSERA_S48 TESSERA_S40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_S64 TESSERA_S48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_S96 TESSERA_S64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_S128 TESSERA_S96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TESSERA_WGMMA(TYPE, N, LIST, OPERANDS, P0, P1, P2, P3, P4, P5) \
  template <> \
  struct Wgmma<Dtype::TYPE, N> { \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" LIST "}, " P0 ", " P1 ", p, 1, 1, 0, 0;\n}\n" \
                   : OPERANDS(d) \
                   : "l"(a), "l"(b), "r"(add)); \
    } \
    static __device__ __forceinline__ void shared_across(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" LIST "}, " P0 ", " P1 ", p, 1, 1, 1, 1;\n}\n" \
                   : OPERANDS(d) \
                   : "l"(a), "l"(b), "r"(add)); \
    } \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const std::uint32_t* a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" LIST "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, 0;\n}\n" \
                   : OPERANDS(d) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    } \
    static __device__ __forceinline__ void registers_across(float (&d)[N / 2], const std::uint32_t* a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" LIST "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, 1;\n}\n" \
                   : OPERANDS(d) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    } \
  };
#define TESSERA_WGMMA_BOTH(N, LIST, OPERANDS, P0, P1, P2, P3, P4, P5) \
  TESSERA_WGMMA(bf16, N, LIST, OPERANDS, P0, P1, P2, P3, P4, P5) \
  TESSERA_WGMMA(f16, N, LIST, OPERANDS, P0, P1, P2, P3, P4, P5)
TESSERA_WGMMA_BOTH(16, TESSERA_S8, TESSERA_FIRST8, "%8", "%9", "%10", "%11", "%12", "%13")
TESSERA_WGMMA_BOTH(32, TESSERA_S16, TESSERA_R16, "%16", "%17", "%18", "%19", "%20", "%21")
TESSERA_WGMMA_BOTH(64, TESSERA_S32, TESSERA_R32, "%32", "%33", "%34", "%35", "%36", "%37")
TESSERA_WGMMA_BOTH(80, TESSERA_S40, TESSERA_R40, "%40", "%41", "%42", "%43", "%44", "%45")
TESSERA_WGMMA_BOTH(96, TESSERA_S48, TESSERA_R48, "%48", "%49", "%50", "%51", "%52", "%53")
TESSERA_WGMMA_BOTH(128, TESSERA_S64, TESSERA_R64, "%64", "%65", "%66", "%67", "%68", "%69")
TESSERA_WGMMA_BOTH(192, TESSERA_S96, TESSERA_R96, "%96", "%97", "%98", "%99", "%100", "%101")
TESSERA_WGMMA_BOTH(256, TESSERA_S128, TESSERA_R128, "%128", "%129", "%130", "%131", "%132", "%133")
#undef TESSERA_WGMMA_BOTH
#undef TESSERA_WGMMA

#define TESSERA_FIRST4(d) TESSERA_R4(d, 0)
#define TESSERA_R36(d) TESSERA_R32(d), TESSERA_R4(d, 32)
#define TESSERA_R52(d) TESSERA_R48(d), TESSERA_R4(d, 48)
#define TESSERA_R68(d) TESSERA_R64(d), TESSERA_R4(d, 64)
#define TESSERA_R100(d) TESSERA_R96(d), TESSERA_R4(d, 96)
#define TESSERA_S4 "%0, %1, %2, %3"
#define TESSERA_S36 TESSERA_S32 ", %32, %33, %34, %35"
#define TESSERA_S52 TESSERA_S48 ", %48, %49, %50, %51"
#define TESSERA_S68 TESSERA_S64 ", %64, %65, %66, %67"
#define TESSERA_S100 TESSERA_S96 ", %96, %97, %98, %99"
#define TESSERA_WGMMA_E4M3(N, LIST, OPERANDS, P0, P1, P2, P3, P4, P5) \
  template <> \
  struct Wgmma<Dtype::e4m3, N> { \
    static __device__ __forceinline__ void shared(float* d, std::uint64_t a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" LIST "}, " P0 ", " P1 ", p, 1, 1;\n}\n" \
                   : OPERANDS(d) \
                   : "l"(a), "l"(b), "r"(add)); \
    } \
    static __device__ __forceinline__ void registers(float* d, const std::uint32_t* a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" LIST "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1;\n}\n" \
                   : OPERANDS(d) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    } \
  };
TESSERA_WGMMA_E4M3(8, TESSERA_S4, TESSERA_FIRST4, "%4", "%5", "%6", "%7", "%8", "%9")
TESSERA_WGMMA_E4M3(32, TESSERA_S16, TESSERA_R16, "%16", "%17", "%18", "%19", "%20", "%21")
TESSERA_WGMMA_E4M3(64, TESSERA_S32, TESSERA_R32, "%32", "%33", "%34", "%35", "%36", "%37")
TESSERA_WGMMA_E4M3(72, TESSERA_S36, TESSERA_R36, "%36", "%37", "%38", "%39", "%40", "%41")
TESSERA_WGMMA_E4M3(96, TESSERA_S48, TESSERA_R48, "%48", "%49", "%50", "%51", "%52", "%53")
TESSERA_WGMMA_E4M3(104, TESSERA_S52, TESSERA_R52, "%52", "%53", "%54", "%55", "%56", "%57")
TESSERA_WGMMA_E4M3(128, TESSERA_S64, TESSERA_R64, "%64", "%65", "%66", "%67", "%68", "%69")
TESSERA_WGMMA_E4M3(136, TESSERA_S68, TESSERA_R68, "%68", "%69", "%70", "%71", "%72", "%73")
TESSERA_WGMMA_E4M3(200, TESSERA_S100, TESSERA_R100, "%100", "%101", "%102", "%103", "%104", "%105")
TESSERA_WGMMA_E4M3(256, TESSERA_S128, TESSERA_R128, "%128", "%129", "%130", "%131", "%132", "%133")
#undef TESSERA_WGMMA_E4M3
#define TESSERA_I8(d, i) "+r"(reinterpret_cast<int&>(d[i])), "+r"(reinterpret_cast<int&>(d[i + 1])), "+r"(reinterpret_cast<int&>(d[i + 2])), "+r"(reinterpret_cast<int&>(d[i + 3])), "+r"(reinterpret_cast<int&>(d[i + 4])), "+r"(reinterpret_cast<int&>(d[i + 5])), "+r"(reinterpret_cast<int&>(d[i + 6])), "+r"(reinterpret_cast<int&>(d[i + 7]))
#define TESSERA_I32(d) TESSERA_I8(d, 0), TESSERA_I8(d, 8), TESSERA_I8(d, 16), TESSERA_I8(d, 24)
#define TESSERA_I48(d) TESSERA_I32(d), TESSERA_I8(d, 32), TESSERA_I8(d, 40)
#define TESSERA_I64(d) TESSERA_I48(d), TESSERA_I8(d, 48), TESSERA_I8(d, 56)
#define TESSERA_WGMMA_I8(N, LIST, OPERANDS, P0, P1, P2, P3, P4, P5) \
  template <> \
  struct Wgmma<Dtype::i8, N> { \
    static __device__ __forceinline__ void shared(float* d, std::uint64_t a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" LIST "}, " P0 ", " P1 ", p;\n}\n" \
                   : OPERANDS(d) \
                   : "l"(a), "l"(b), "r"(add)); \
    } \
    static __device__ __forceinline__ void registers(float* d, const std::uint32_t* a, std::uint64_t b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P5 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" LIST "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p;\n}\n" \
                   : OPERANDS(d) \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    } \
  };
TESSERA_WGMMA_I8(64, TESSERA_S32, TESSERA_I32, "%32", "%33", "%34", "%35", "%36", "%37")
TESSERA_WGMMA_I8(96, TESSERA_S48, TESSERA_I48, "%48", "%49", "%50", "%51", "%52", "%53")
TESSERA_WGMMA_I8(128, TESSERA_S64, TESSERA_I64, "%64", "%65", "%66", "%67", "%68", "%69")
#undef TESSERA_WGMMA_I8
#undef TESSERA_I8
#undef TESSERA_I32
#undef TESSERA_I48
#undef TESSERA_I64
#undef TESSERA_FIRST4
#undef TESSERA_R4
#undef TESSERA_R36
#undef TESSERA_R52
#undef TESSERA_R68
#undef TESSERA_R100
#undef TESSERA_S4
#undef TESSERA_S36
#undef TESSERA_S52
#undef TESSERA_S68
#undef TESSERA_S100
#undef TESSERA_FIRST8
#undef TESSERA_S8
#undef TESSERA_R8
#undef TESSERA_R16
#undef TESSERA_R32
#undef TESSERA_R40
#undef TESSERA_R48
#undef TESSERA_R64
#undef TESSERA_R96
#undef TESSERA_R128
#undef TESSERA_S16
#undef TESSERA_S32
#undef TESSERA_S40
#undef TESSERA_S48
#undef TESSERA_S64
#undef TESSERA_S96
#undef TESSERA_S128
// clang-format on

}  // namespace tessera::cuda::ptx
