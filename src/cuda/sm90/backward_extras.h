// What stands between a product and its weight besides scale and mask, and what that means for the
// gradients: softcap, bias, ALiBi, dropout. Of accumulators whose rows are keys and whose columns
// are queries.
#pragma once

#include "core/philox.h"
#include "core/score.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/sm90/backward_params.h"
#include "cuda/sm90/fragment.h"

namespace tessera::cuda::sm90 {

/// Where a thread's accumulators lie in the scores of a query head.
struct ScorePlace {
  int batch, head;
  int first_query;  ///< of the block of rows
  int first_key;    ///< of the warp's 16, a multiple of 8
  int seqlen_q, seqlen_k;
  std::uint32_t lane;

  // Opaque: what is made of them is made anew each time, not kept in registers for 32 scores.
  __device__ __forceinline__ int query_of(int i) const {
    return static_cast<int>(ptx::opaque(first_query + lane % 4 * 2)) + i / 4 * 8 + i % 2;
  }
  __device__ __forceinline__ int key_of(int i) const {
    return static_cast<int>(ptx::opaque(first_key + lane / 4)) + 8 * (i / 2 % 2);
  }
  __device__ __forceinline__ bool exists(int i) const {
    return query_of(i) < seqlen_q && key_of(i) < seqlen_k;
  }
};

/// Raw products become base-2 scores (S1). slopes: the softcap's derivatives, pairs of f16; they
/// lie between 0 and 1 and are as precise there as what they are multiplied with will be.
template <int kCount>
__device__ __forceinline__ void transform_scores(const BackwardParams& p, const ScorePlace& at,
                                                 float (&s)[kCount],
                                                 std::uint32_t (&slopes)[kCount / 2]) {
  const float alibi = p.alibi_slopes == nullptr
                          ? 0.0F
                          : p.alibi_slopes[(p.alibi_per_batch ? at.batch * p.heads : 0) + at.head];
  const std::int64_t bias_start = at.batch * p.bias_batch + at.head * p.bias_head;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    float slope[2] = {1.0F, 1.0F};
#pragma unroll
    for (int j = i; j < i + 2; ++j) {
      float x = s[j] * p.score.pre;
      if (p.score.capped) {
        // tanh(x) = 1 - 2 / (e^2x + 1), right at both ends; 1 - tanh^2 does not cancel so.
        const float rest = 2.0F * ptx::rcp(ptx::ex2(2.0F * core::kLog2e * fabsf(x)) + 1.0F);
        slope[j - i] = rest * (2.0F - rest);
        x = copysignf(1.0F - rest, x) * p.score.post;
      }
      const int query = at.query_of(j), key = at.key_of(j);
      if (p.bias != nullptr && at.exists(j)) {
        const std::int64_t from = bias_start + query * p.bias_query + key * p.bias_key;
        x += load_float(p.bias, p.bias_dtype, from) * core::kLog2e;
      }
      const int distance = query + at.seqlen_k - at.seqlen_q - key;
      s[j] = x + core::alibi2(alibi, fabsf(static_cast<float>(distance)));
    }
    slopes[i / 2] = ptx::pack<Dtype::f16>(slope[0], slope[1]);
  }
}

/// The derivative of score i.
template <int kCount>
__device__ __forceinline__ float slope_of(const std::uint32_t (&slopes)[kCount], int i) {
  return ptx::widen_f16(static_cast<std::uint16_t>(slopes[i / 2] >> i % 2 * 16));
}

/// Bit i of kept: the weight i is not dropped (S8). One Philox call serves eight keys of a query,
/// which are rows of eight lanes: each of these makes every eighth call, and they exchange words.
template <int kCount>
__device__ __forceinline__ void draw_dropout(const BackwardParams& p, const ScorePlace& at,
                                             std::uint32_t (&kept)[kCount / 32]) {
  const std::uint32_t row = at.lane / 4;  // of eight keys
#pragma unroll
  for (int word = 0; word < kCount / 32; ++word) kept[word] = p.dropout.active() ? 0 : ~0U;
  if (!p.dropout.active()) return;
#pragma unroll
  for (int first = 0; first < kCount; first += 8) {
    // Accumulators first to first + 7: four queries for each of two octets of keys.
    const int mine = first + static_cast<int>(row);
    const core::Philox4<std::uint32_t> bits = core::dropout_bits<std::uint32_t>(
        p.dropout, at.batch, at.head,
        at.first_query + mine / 4 * 8 + static_cast<int>(at.lane % 4) * 2 + mine % 2,
        at.first_key / core::kPhiloxKeys + mine / 2 % 2);
#pragma unroll
    for (int i = first; i < first + 8; ++i) {
      const int from = (i - first) * 4 + static_cast<int>(at.lane % 4);
      std::uint32_t word = 0;
#pragma unroll
      for (std::uint32_t w = 0; w < 4; ++w) {
        const std::uint32_t other = __shfl_sync(~0U, bits.word[w], from);
        if (row / 2 == w) word = other;
      }
      const std::uint32_t half = row % 2 != 0 ? word >> 16 : word & 0xFFFFU;
      if (half >= p.dropout.threshold) kept[i / 32] |= 1U << i % 32;
    }
  }
}

__device__ __forceinline__ bool bit(const std::uint32_t* words, int i) {
  return (words[i / 32] >> i % 32 & 1) != 0;
}

/// The gradients of scores, before the softcap's derivative, go to dbias.
template <int kCount>
__device__ __forceinline__ void store_bias_gradient(const BackwardParams& p, const ScorePlace& at,
                                                    const float (&ds)[kCount]) {
  if (p.dbias == nullptr) return;
  const std::int64_t start = at.batch * p.dbias_batch + at.head * p.dbias_head;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!at.exists(i)) continue;
    const std::int64_t to = start + at.query_of(i) * p.dbias_query + at.key_of(i) * p.dbias_key;
    if (p.dbias_adds) {
      atomicAdd(static_cast<float*>(p.dbias) + to, ds[i]);
    } else {
      store_float(p.dbias, p.bias_dtype, to, ds[i]);
    }
  }
}

}  // namespace tessera::cuda::sm90
