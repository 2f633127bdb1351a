// Sums of O in shared memory, each warp's in a part of its own and there each thread's own
// elements, where 8-bit products are added to accumulators that lose small terms (forward_8bit.h).
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

/// They are fp32. Where there is no room for that they are bf16, and what they are rounded by stays
/// with the accumulators, beside which it is not small.
template <core::Kernel K>
class PromotedSums {
  static constexpr int kCount = K.head_dim_v / 2;  ///< of a thread
  static constexpr bool kRounded = rounds_promoted(K);
  static constexpr int kOfWord = kRounded ? 2 : 1, kAtOnce = 4 * kOfWord;
  static constexpr int kWarpBytes = promoted_bytes(K) / (K.block_m / 16);

 public:
  __device__ __forceinline__ PromotedSums(std::uint32_t promoted, int group)
      : start_(promoted + (group * 4 + threadIdx.x % 128 / 32) * kWarpBytes +
               threadIdx.x % 32 * 16) {}

  /// Where the warp's are.
  __device__ __forceinline__ std::uint32_t warp_part(std::uint32_t lane) const {
    return start_ - lane * 16;
  }

  /// o += the sums times their rows' factors.
  template <int kAll>
  __device__ __forceinline__ void add_to(float (&o)[kAll], const float (&factor)[2]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += kAtOnce) {
      float word[4];
      ptx::load_shared(slot(i), word[0], word[1], word[2], word[3]);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float& to = o[i + j];
        to = fmaf(element(word[j / kOfWord], j), factor[j / 2 % 2], to);
      }
    }
  }
  /// They become o; and o what they are less.
  template <int kAll>
  __device__ __forceinline__ void keep(float (&o)[kAll]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += kAtOnce) {
      float word[4];
#pragma unroll
      for (int j = 0; j < kAtOnce; j += kOfWord) {
        float& w = word[j / kOfWord];
        w = kRounded ? __uint_as_float(ptx::pack<Dtype::bf16>(o[i + j], o[i + j + kOfWord - 1]))
                     : o[i + j];
#pragma unroll
        for (int k = j; kRounded && k < j + kOfWord; ++k) o[i + k] -= element(w, k);
      }
      ptx::store_shared(slot(i), word[0], word[1], word[2], word[3]);
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t slot(int i) const { return start_ + i / kAtOnce * 512; }
  /// The j-th of a row of elements, which is in that word.
  static __device__ __forceinline__ float element(float word, int j) {
    if (!kRounded) return word;
    const std::uint32_t bits = __float_as_uint(word);
    return __uint_as_float(j % 2 == 0 ? bits << 16 : bits & 0xFFFF0000U);
  }

  const std::uint32_t start_;
};

}  // namespace tessera::cuda::sm90
