// What stands between a product and its score besides scale, softcap and mask: a bias and ALiBi
// (S1). For accumulators of a warp (ptx/wgmma.h): a thread's i-th is
// (i / 2 % 2) * 8 rows and i / 4 * 8 + i % 2 columns from its first one. Rows are queries and
// columns keys in the forward pass; in the backward pass rows are keys.
#pragma once

#include "core/score.h"
#include "cuda/source.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda {

/// Which axis of the accumulators the queries are.
enum class Axis : std::uint8_t { rows, columns };

/// Where a thread's first accumulator lies in the scores of a query head.
struct ScorePlace {
  int batch, head;
  int first_query, first_key;
  int seqlen_q, seqlen_k;

  TESSERA_HD constexpr std::int64_t first_of(const core::BiasStrides& strides) const {
    return strides.offset(batch, head, first_query, first_key);
  }
  /// How many columns exist from the first on in the half-th of the thread's two rows.
  template <Axis kQueries>
  __device__ __forceinline__ int columns_left(int half) const {
    const int queries = seqlen_q - first_query, keys = seqlen_k - first_key;
    if (kQueries == Axis::rows) return 8 * half < queries ? keys : 0;
    return 8 * half < keys ? queries : 0;
  }
};

template <Axis kQueries, class T, int kCount>
__device__ __forceinline__ void add_bias_of(const Extras& x, const ScorePlace& at,
                                            float (&s)[kCount]) {
  // Pairs of columns whose loads are under way together.
  constexpr int kAtOnce = core::min(4, kCount / 4);
  constexpr bool kRows = kQueries == Axis::rows;
  const std::int64_t row = kRows ? x.bias_strides.query : x.bias_strides.key;
  const std::int64_t column = kRows ? x.bias_strides.key : x.bias_strides.query;
  const std::int64_t start = at.first_of(x.bias_strides);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T* from = static_cast<const T*>(x.bias) + start + 8 * half * row;
    const int left = at.columns_left<kQueries>(half);
#pragma unroll
    for (int first = 0; first < kCount / 4; first += kAtOnce) {
      T element[kAtOnce][2];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c, from += 8 * column) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          element[c][j] = ptx::load_if(8 * (first + c) + j < left, from + j * column);
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        float& score = s[4 * (first + i / 2) + 2 * half + i % 2];
        const float bias2 = to_float(element[i / 2][i % 2], x.bias_dtype) * core::kLog2e;
        score = core::add_to_score(score, true, bias2, false, 0.0F, 0.0F);
      }
    }
  }
}

/// The same as add_extras(), of the half-th of the thread's two rows alone: where rows that share a
/// tile belong to several heads. Queries are rows; `at` is of that row.
template <int kCount>
__device__ __forceinline__ void add_extras_of_row(const Extras& x, const ScorePlace& at, int half,
                                                  float (&s)[kCount]) {
  const bool biased = x.bias != nullptr, sloped = x.alibi_slopes != nullptr;
  const std::int64_t start = at.first_of(x.bias_strides);
  const float slope = sloped ? x.alibi_slopes[at.batch * x.alibi_batch + at.head] : 0.0F;
  const auto diagonal =
      static_cast<float>(at.first_query + at.seqlen_k - at.seqlen_q - at.first_key);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const int column = i / 2 * 8 + i % 2;
    float& score = s[i / 2 * 4 + 2 * half + i % 2];
    float bias = 0.0F;
    if (biased && column < at.seqlen_k - at.first_key) {
      const std::int64_t from = start + column * x.bias_strides.key;
      bias = x.bias_dtype == Dtype::f32
                 ? static_cast<const float*>(x.bias)[from]
                 : to_float(static_cast<const std::uint16_t*>(x.bias)[from], x.bias_dtype);
    }
    score = core::add_to_score(score, biased, bias * core::kLog2e, sloped, slope,
                               fabsf(diagonal - static_cast<float>(column)));
  }
}

/// Scaled or capped products become base-2 scores before the mask: core::add_to_score of each.
template <Axis kQueries, int kCount>
__device__ __forceinline__ void add_extras(const Extras& x, const ScorePlace& at,
                                           float (&s)[kCount]) {
  if (x.bias != nullptr) {
    if (x.bias_dtype == Dtype::f32) {
      add_bias_of<kQueries, float>(x, at, s);
    } else {
      add_bias_of<kQueries, std::uint16_t>(x, at, s);
    }
  }
  if (x.alibi_slopes != nullptr) {
    const float slope = x.alibi_slopes[at.batch * x.alibi_batch + at.head];
    // From the diagonal: one further a query, one less a key.
    const auto first =
        static_cast<float>(at.first_query + at.seqlen_k - at.seqlen_q - at.first_key);
    constexpr int kByRow = kQueries == Axis::rows ? 1 : -1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto further = static_cast<float>(kByRow * (i / 2 % 2 * 8 - i / 4 * 8 - i % 2));
      s[i] = core::add_to_score(s[i], false, 0.0F, true, slope, fabsf(first + further));
    }
  }
}

}  // namespace tessera::cuda
