// The enumerations that problems, devices and kernels share. Needs no standard library beyond
// <cstdint>, so device code can include it.
#pragma once

#include <cstdint>

namespace tessera {

/// Storage type of a tensor. Arithmetic inside is always fp32 (S7).
enum class Dtype : std::uint8_t {
  f32,
  bf16,
  f16,
  e4m3,  ///< 8 bits: sign, 4 of exponent, 3 of fraction; up to 448, without infinities
  i8,    ///< 8 bits: -128 to 127
};
/// How many there are.
inline constexpr int kDtypes = 5;
/// How many of them come first whose elements are the values. Code that tells two of these apart
/// and takes the rest for the third asserts this number.
inline constexpr int kPlainDtypes = 3;

/// Whether a value is an element times a scale (S14): the types of 8 bits.
constexpr bool is_scaled(Dtype dtype) { return static_cast<int>(dtype) >= kPlainDtypes; }

/// Which elements of a tensor share a scale (S14).
enum class Scaling : std::uint8_t {
  none,     ///< it has none
  tensor,   ///< all: one number
  head,     ///< of a sequence and a key/value head, of q too: (batch, num_heads_k)
  token,    ///< a row of q: (batch, num_heads, seqlen_q), packed (num_heads, total_q). Of k or v a
            ///< key: as the tensor lies, but without head_dim, and with strides of its own
  block,    ///< so many keys of k or v, from a sequence's first on: (batch, num_heads_k, blocks)
  channel,  ///< a column of v: (batch, num_heads_k, head_dim_v)
  group,    ///< so many columns of a key of v: as of token, and with a last dimension of groups
};

enum class Pass : std::uint8_t { forward, backward };

/// Where causal and window masks are anchored when seqlen_q != seqlen_k (S2).
enum class Alignment : std::uint8_t {
  bottom_right,  ///< query i sits at key position i + seqlen_k - seqlen_q (FlashAttention >= 2.1)
  top_left,      ///< query i sits at key position i (PyTorch SDPA's is_causal)
};

/// Shape of an optional per-head parameter such as the ALiBi slopes.
enum class PerHead : std::uint8_t { none, heads, batch_heads };

/// What the lengths of sequences in a cache count (S13).
enum class Lengths : std::uint8_t {
  full,    ///< there are none: every sequence fills its slots
  after,   ///< the slots that are filled: new keys were appended before they were counted
  before,  ///< the slots that were filled before the new keys were appended, which count, too
};

/// Type of page numbers.
enum class PageIds : std::uint8_t { i32, i64 };

/// Type of positions that are given row by row.
enum class PositionType : std::uint8_t { i32, i64 };

/// Instruction sets that a device may have; the catalog says which have kernels of their own. Among
/// the CPU's, a larger value includes the smaller.
enum class Arch : std::uint8_t {
  portable,     ///< plain C++ vectors: SSE2 on x86-64, NEON on aarch64
  avx2,         ///< AVX2, FMA, F16C
  avx512,       ///< AVX-512 F, BW, DQ, VL
  avx512_bf16,  ///< and VDPBF16PS, VBMI: Zen 4, Sapphire Rapids, and newer
  sm75,         ///< NVIDIA Turing: mma.sync in fp16, no cp.async
  sm80,         ///< NVIDIA Ampere and newer: mma.sync and cp.async, which all of them have
  sm90,         ///< NVIDIA Hopper
};
/// How many there are.
inline constexpr int kArchs = static_cast<int>(Arch::sm90) + 1;

constexpr bool is_gpu(Arch arch) { return arch >= Arch::sm75; }

/// Whether a device of one set runs kernels of another. CPUs run what they include; a GPU's code
/// runs where it was made for.
constexpr bool runs(Arch device, Arch kernel) {
  return is_gpu(device) || is_gpu(kernel) ? device == kernel : device >= kernel;
}

/// Bytes of one element.
constexpr std::int64_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return 4;
    case Dtype::bf16:
    case Dtype::f16: return 2;
    case Dtype::e4m3:
    case Dtype::i8: return 1;
  }
  return 0;
}

}  // namespace tessera
