// What stands between a product and its weight besides scale and mask, and what that means for the
// gradients: softcap, bias, ALiBi, dropout. Of accumulators whose rows are keys and whose columns
// are queries.
#pragma once

#include "core/philox.h"
#include "core/score.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/tile/backward_params.h"
#include "cuda/tile/extras.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda {

/// Raw products become base-2 scores (S1). store_slopes(slopes) gets the softcap's derivatives,
/// pairs of f16, before registers are needed for more; they lie between 0 and 1 and are as precise
/// there as what they are multiplied with will be.
template <int kCount, class Store>
__device__ __forceinline__ void transform_scores(const BackwardPass& p, const ScorePlace& at,
                                                 float (&s)[kCount], const Store& store_slopes) {
  if (p.score.capped) {
    std::uint32_t slopes[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      float slope[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = s[i + j] * p.score.pre;
        // tanh(x) = 1 - 2 / (e^2x + 1), right at both ends; 1 - tanh^2 does not cancel so.
        const float rest = 2.0F * ptx::rcp(ptx::ex2(2.0F * core::kLog2e * fabsf(x)) + 1.0F);
        // A score of another sequence's row may be NaN: its slope meets a dS of 0.
        slope[j] = fmaxf(rest * (2.0F - rest), 0.0F);
        s[i + j] = copysignf(1.0F - rest, x) * p.score.post;
      }
      slopes[i / 2] = ptx::pack<Dtype::f16>(slope[0], slope[1]);
    }
    store_slopes(slopes);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= p.score.pre;
  }
  add_extras<Axis::columns>(p.extras, at, s);
}

/// The derivative of score i.
template <int kCount>
__device__ __forceinline__ float slope_of(const std::uint32_t (&slopes)[kCount], int i) {
  return ptx::widen_f16(static_cast<std::uint16_t>(slopes[i / 2] >> i % 2 * 16));
}

/// Dropout (S8): dropped weights become 0, the others are scaled. One Philox call serves eight keys
/// of a query, which are rows of eight lanes: each of these makes every eighth call, and they
/// exchange words.
template <int kCount>
__device__ __forceinline__ void drop(const BackwardPass& p, const ScorePlace& at,
                                     float (&x)[kCount]) {
  if (!p.dropout.active()) return;
  static_assert(kCount <= 32);
  const std::uint32_t lane = threadIdx.x % 32, row = lane / 4;  // row: of eight keys
  std::uint32_t kept = 0;                                       // bit i: of x[i]
#pragma unroll 1
  for (int first = 0; first < kCount; first += 8) {
    // Accumulators first to first + 7: four queries for each of two octets of keys.
    const int mine = first + static_cast<int>(row);
    const core::Philox4<std::uint32_t> random = core::dropout_bits<std::uint32_t>(
        p.dropout, at.batch, at.head, at.first_query + mine / 4 * 8 + mine % 2,
        at.first_key / core::kPhiloxKeys + mine / 2 % 2);
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int from = i * 4 + static_cast<int>(lane % 4);
      std::uint32_t word = 0;
#pragma unroll
      for (std::uint32_t w = 0; w < 4; ++w) {
        const std::uint32_t other = __shfl_sync(~0U, random.word[w], from);
        if (core::dropout_word(row) == w) word = other;
      }
      if (core::dropout_keeps(p.dropout, core::dropout_half(word, static_cast<int>(row)))) {
        bits |= 1U << i;
      }
    }
    kept |= bits << first;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = (kept >> i & 1) != 0 ? x[i] * p.dropout.keep_scale : 0.0F;
  }
}

/// The gradients of scores, before the softcap's derivative, go to dbias.
template <int kCount>
__device__ __forceinline__ void store_bias_gradient(const BackwardPass& p, const ScorePlace& at,
                                                    const float (&ds)[kCount]) {
  if (p.dbias == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int left = at.columns_left<Axis::columns>(half);
    std::int64_t to =
        p.dbias_strides.offset(at.batch, at.head, at.first_query, at.first_key + 8 * half);
#pragma unroll
    for (int c = 0; c < kCount / 4; ++c, to += 8 * p.dbias_strides.query) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (8 * c + j >= left) continue;
        const float x = ds[4 * c + 2 * half + j];
        if (p.dbias_adds) {
          atomicAdd(static_cast<float*>(p.dbias) + to + j * p.dbias_strides.query, x);
        } else {
          store_float(p.dbias, p.extras.bias_dtype, to + j * p.dbias_strides.query, x);
        }
      }
    }
  }
}

}  // namespace tessera::cuda
