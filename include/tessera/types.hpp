// The enumerations that problems, devices and kernels share. Needs no standard library beyond
// <cstdint>, so device code can include it.
#pragma once

#include <cstdint>

namespace tessera {

/// Storage type of q, k, v, o and their gradients. Arithmetic inside is always fp32 (S7).
enum class Dtype : std::uint8_t { f32, bf16, f16 };

enum class Pass : std::uint8_t { forward, backward };

/// Where causal and window masks are anchored when seqlen_q != seqlen_k (S2).
enum class Alignment : std::uint8_t {
  bottom_right,  ///< query i sits at key position i + seqlen_k - seqlen_q (FlashAttention >= 2.1)
  top_left,      ///< query i sits at key position i (PyTorch SDPA's is_causal)
};

/// Shape of an optional per-head parameter such as the ALiBi slopes.
enum class PerHead : std::uint8_t { none, heads, batch_heads };

/// Instruction sets with kernels of their own. Among the CPU's, a larger value includes the
/// smaller.
enum class Arch : std::uint8_t {
  portable,     ///< plain C++ vectors: SSE2 on x86-64, NEON on aarch64
  avx2,         ///< AVX2, FMA, F16C
  avx512,       ///< AVX-512 F, BW, DQ, VL
  avx512_bf16,  ///< and VDPBF16PS
  sm90,         ///< NVIDIA Hopper
};

constexpr bool is_gpu(Arch arch) { return arch >= Arch::sm90; }

/// Bytes of one element: 4 or 2.
constexpr std::int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

}  // namespace tessera
