// What a consuming warpgroup of the latent kernel (latent.h) does otherwise where values are of 8
// bits beside keys of 16 (S14), as in FlashMLA's rows of 656 bytes: 512 values of e4m3, a scale for
// each 128 of them, 64 columns of keys.
//
// Values become fp16, which holds them exactly, on their way from shared memory to registers, from
// where wgmma takes its first operand: V of S^T, V^T of O^T. So do queries that meet them, times a
// power of two of their row. A key's scales by groups of columns are multiplied with the sums of
// each group (16 rows) and with weights, which each group has of its own (up to 32). Where there
// are too many rows for that, elements are multiplied by the scale of their group over the greatest
// of their key, and what is made of the key, scores or weights, by that one. Weights of fp16 lack a
// power of two, which is at least the greatest scale so far.
#pragma once

#include "cuda/mma/decode_widened.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/latent_loads.h"

namespace tessera::cuda::sm90 {

template <core::Kernel K>
class LatentWidened {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kN = K.block_m, kKeys = K.block_n;
  static constexpr int kMine = K.head_dim_v / 128;  ///< chunks of 64 columns of O
  static constexpr int kGroups = latent_groups(K), kSteps = kKeys / 16;
  static constexpr std::uint32_t kChunk = kKeys * 128;    ///< bytes of a chunk of keys
  static constexpr std::uint32_t kQueryChunk = kN * 128;  ///< and of queries
  using Wgmma = ptx::Wgmma<Dtype::f16, kN>;
  /// Operands that are made while the ones before are multiplied: of so many times 16 columns of
  /// keys, and of so many chunks of values, of which each has those of two chunks of O.
  static constexpr int kAtOnce = kN > 32 ? 2 : 8, kAtOnceV = kN > 32 ? 1 : 2;
  static constexpr int kUnits = 8;  ///< of 16 columns of 8 bits, in a chunk
  static constexpr int kWeights = latent_weights(K);
  /// Whether groups of columns have sums of their own, which scales are multiplied with: where
  /// registers suffice. Else elements are.
  static constexpr bool kApart = kN == 16;
  static_assert(core::kScaledColumns == kUnits * 16);

 public:
  static constexpr int kQueriesReady = 6;   ///< a named barrier
  static constexpr float kOffset = 0x1p7F;  ///< weights begin there, and end long before fp16 does

  __device__ __forceinline__ explicit LatentWidened(LatentShared<K>& shared)
      : shared_(shared), thread_(static_cast<int>(ptx::opaque(threadIdx.x))) {}

  // ---- pieces ----

  /// Queries that meet values become fp16: each warp makes some rows.
  __device__ __forceinline__ void begin(Dtype dtype, std::uint32_t queries) const {
    const std::uint32_t from = queries - ptx::shared_address(shared_.queries) + kQueryChunk;
    char* const chunks = shared_.queries[0] + from;
#pragma unroll 1
    for (int row = thread_ / 32; row < kN; row += 8) {
      const float factor = mma::widen_queries<K.head_dim_v>(dtype, [&](int word) {
        const int unit = word / 4;
        char* const line = chunks + unit / 8 * kQueryChunk + row * 128;
        return reinterpret_cast<std::uint32_t*>(line + (unit % 8 ^ row % 8) * 16) + word % 4;
      });
      if (lane_ == 0) shared_.scales.query_factors[row] = factor;
    }
    constexpr std::uint32_t kLeast = 27U << 23;  // 2^-100
    if (thread_ == 0) shared_.scales.top = __uint_as_float(kLeast);
  }
  /// Outputs get what they lack.
  __device__ __forceinline__ void finish(float (&o)[kMine][kN / 2]) const {
    const float factor = shared_.scales.top / kOffset;
#pragma unroll
    for (int c = 0; c < kMine; ++c) {
#pragma unroll
      for (float& x : o[c]) x *= factor;
    }
  }

  // ---- scales ----

  /// The greatest scales of the lane's keys, lane / 4 and 8 further on of the warp's 16. Whether
  /// one exceeds those so far.
  __device__ __forceinline__ bool scales_of_values(std::uint32_t keys, float (&most)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) most[half] = greatest(scales_of(keys, half));
    return fmaxf(most[0], most[1]) > shared_.scales.top;
  }
  /// tops: of warps.
  __device__ __forceinline__ void leave_top(const float (&most)[2], float* tops) const {
    float top = fmaxf(most[0], most[1]);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0U, top, lanes));
    }
    if (lane_ == 0) tops[warp_] = top;
  }
  /// What the power of two becomes.
  __device__ __forceinline__ float raised(const float* tops) const {
    const float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    constexpr std::uint32_t kFraction = 0x7FFFFFU;
    return fmaxf(shared_.scales.top,
                 __uint_as_float((__float_as_uint(top) + kFraction) & ~kFraction));
  }
  /// Weights of a block and their sums, as the kernel stores them; but times scales: those of each
  /// group of columns or, where weights lie there once, the greatest of their key.
  __device__ __forceinline__ void store(float (&s)[kN / 2], float (&sums)[kN / 4],
                                        std::uint32_t keys, const float (&most)[2]) const {
    const float lacks = kOffset / shared_.scales.top;
    float scales[2][kWeights];
    if constexpr (kWeights == 1) {
      tell_shares(keys, most);
#pragma unroll
      for (int half = 0; half < 2; ++half) scales[half][0] = most[half] * lacks;
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = scales_of(keys, half);
        scales[half][0] = x.x * lacks;
        scales[half][1] = x.y * lacks;
        scales[half][2] = x.z * lacks;
        scales[half][3] = x.w * lacks;
      }
    }
    const std::uint32_t key = static_cast<std::uint32_t>(warp_) * 16 + lane_ % 16;
    const std::uint32_t to = ptx::shared_address(shared_.weights) + key * 128;
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      float weights[4][2];  // of neighbouring rows: 8 rows of two keys, and the next 8
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          weights[n][j] = ptx::ex2(s[8 * i + 2 * n + j]);
          sums[4 * i + n / 2 * 2 + j] += weights[n][j];
        }
      }
#pragma unroll
      for (int w = 0; w < kWeights; ++w) {
        std::uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float scale = scales[n % 2][w];
          words[n] = ptx::pack<Dtype::f16>(weights[n][0] * scale, weights[n][1] * scale);
        }
        const std::uint32_t unit = w * kN / 8 % 8 + 2 * i + lane_ / 16;
        ptx::store_matrices(to + w * kN / 64 * kChunk + (unit ^ key % 8) * 16, words);
      }
    }
  }

  // ---- products ----

  /// S^T of a block.
  __device__ __forceinline__ void multiply_keys(float (&s)[kN / 2], std::uint32_t keys,
                                                std::uint32_t queries) const {
    if constexpr (kApart) multiply_rotated(s, keys, queries, 0);
    float sums[kApart ? kGroups : 1][kN / 2];
    float most[2] = {1.0F, 1.0F};
    std::uint32_t shares[kGroups][2];
    if constexpr (!kApart) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 scales = scales_of(keys, half);
        most[half] = greatest(scales);
        const float over = inverse(most[half]);
        const float of[kGroups] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          shares[g][half] = ptx::pack<Dtype::f16>(of[g] * over, of[g] * over);
        }
      }
    }
    // Of all lanes, as the compiler can see.
    const std::uint32_t to = __shfl_sync(~0U, ptx::descriptor_along(queries + kQueryChunk), 0);
    constexpr int kBatches = kGroups * kUnits / kAtOnce;
    std::uint32_t words[2][kAtOnce / 2][4], a[2][4 * kAtOnce];
    load_keys(words[0], keys, 0);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      std::uint32_t* const now = a[batch % 2];
      if (batch >= 2) ptx::wgmma_wait<1>();
      if (batch + 1 < kBatches) load_keys(words[(batch + 1) % 2], keys, (batch + 1) * kAtOnce);
      const int group = batch * kAtOnce / kUnits;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::uint32_t* const from = words[batch % 2][i / 2] + i % 2 * 2;
        std::uint32_t* const x = now + 4 * i;
        ptx::widen_four<K.cached>(from[0], x[0], x[2]);
        ptx::widen_four<K.cached>(from[1], x[1], x[3]);
        if constexpr (!kApart) {
#pragma unroll
          for (int n = 0; n < 4; ++n) x[n] = ptx::multiply_pairs(x[n], shares[group][n % 2]);
        }
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int step = batch * kAtOnce + i;
        Wgmma::registers(sums[kApart ? group : 0], now + 4 * i,
                         ptx::descriptor(to + (step / 4 * kQueryChunk + step % 4 * 32) / 16),
                         (kApart ? step % kUnits : step) != 0);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& sum : sums) ptx::wgmma_results(sum);
    if constexpr (kApart) {
      ptx::wgmma_results(s);
      add_groups(s, sums, keys);
    } else {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        s[i] = sums[0][i] * (most[i / 2 % 2] * query_factors(i / 4)[i % 2]);
      }
      multiply_rotated(s, keys, queries, 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(s);
    }
  }

  /// O^T += V^T P^T, the warpgroup's columns. Of 16 columns the even ones are the first 8 rows.
  __device__ __forceinline__ void multiply_values(float (&o)[kMine][kN / 2],
                                                  std::uint32_t keys) const {
    constexpr int kChunksV = kMine / 2;  // of values, a group each
    constexpr std::uint32_t kStep = 16 * 128;
    const int first = thread_ / 128 * kChunksV;
    const std::uint32_t weights = __shfl_sync(
        ~0U, ptx::descriptor_across(ptx::shared_address(shared_.weights), kKeys * 128), 0);
    const int first_weights = kWeights == 1 ? 0 : __shfl_sync(~0U, first, 0);
    constexpr int kBatches = kSteps * kChunksV / kAtOnceV;
    std::uint32_t words[2][kAtOnceV][4], a[2][2 * kAtOnceV][4];
    load_values(words[0], keys, first, 0);
#pragma unroll
    for (int c = 0; c < kMine; ++c) ptx::wgmma_results(o[c]);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      if (batch >= 2) ptx::wgmma_wait<1>();
      const int step = batch * kAtOnceV / kChunksV, begin = batch * kAtOnceV % kChunksV;
      if (batch + 1 < kBatches) load_values(words[(batch + 1) % 2], keys, first, batch + 1);
#pragma unroll
      for (int i = 0; i < kAtOnceV; ++i) {
        const std::uint32_t* const from = words[batch % 2][i];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          std::uint32_t* const x = a[batch % 2][2 * i + j];
          ptx::widen_four<K.cached>(ptx::permute<0x6420>(from[2 * j], from[2 * j + 1]), x[0], x[2]);
          ptx::widen_four<K.cached>(ptx::permute<0x7531>(from[2 * j], from[2 * j + 1]), x[1], x[3]);
          if constexpr (kWeights == 1) {
            const std::uint32_t(&shares)[2] =
                shared_.scales.shares[first + begin + i][lane_ % 4][step];
#pragma unroll
            for (int n = 0; n < 4; ++n) x[n] = ptx::multiply_pairs(x[n], shares[n / 2]);
          }
        }
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int c = 0; c < 2 * kAtOnceV; ++c) {
        // Weights of a group, of which several may lie in a key's 128 bytes.
        const int w = kWeights == 1 ? 0 : first_weights + begin + c / 2;
        const std::uint32_t at = w * kN / 64 * kChunk + w * kN % 64 * 2 + step * kStep;
        Wgmma::registers_across(o[2 * begin + c], a[batch % 2][c],
                                ptx::descriptor(weights + at / 16), 1);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int c = 0; c < kMine; ++c) ptx::wgmma_results(o[c]);
  }

 private:
  /// Keys and 8 further on of two units of 16 columns each, from a unit on.
  __device__ __forceinline__ void load_keys(std::uint32_t (&words)[kAtOnce / 2][4],
                                            std::uint32_t keys, int unit) const {
    const std::uint32_t from =
        keys + kChunk * (1 + unit / kUnits) + (warp_ * 16 + lane_ % 16) * 128;
    const std::uint32_t column = static_cast<std::uint32_t>(lane_ / 16 ^ lane_ % 8) * 16;
#pragma unroll
    for (int i = 0; i < kAtOnce / 2; ++i) {
      ptx::load_matrices(words[i], from + (column ^ (unit % kUnits + 2 * i) * 16));
    }
  }
  /// The warp's 16 columns of 16 keys, in both halves of chunks.
  __device__ __forceinline__ void load_values(std::uint32_t (&words)[kAtOnceV][4],
                                              std::uint32_t keys, int first, int batch) const {
    constexpr int kChunksV = kMine / 2;
    const int step = batch * kAtOnceV / kChunksV, begin = batch * kAtOnceV % kChunksV;
    const std::uint32_t unit = static_cast<std::uint32_t>((lane_ / 16 * 4 + warp_) ^ lane_ % 8);
    const std::uint32_t from =
        keys + kChunk * (1 + first + begin) + (step * 16 + lane_ % 16) * 128 + unit * 16;
#pragma unroll
    for (int i = 0; i < kAtOnceV; ++i) ptx::load_matrices_across(words[i], from + i * kChunk);
  }
  /// Begins S^T = or += K Q^T, of columns of 16 bits.
  __device__ __forceinline__ void multiply_rotated(float (&s)[kN / 2], std::uint32_t keys,
                                                   std::uint32_t queries, int add) const {
    const std::uint32_t a = __shfl_sync(~0U, ptx::descriptor_along(keys), 0);
    const std::uint32_t b = __shfl_sync(~0U, ptx::descriptor_along(queries), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < K.head_dim / 16; ++i) {
      ptx::Wgmma<kType, kN>::shared(s, ptx::descriptor(a + i * 2), ptx::descriptor(b + i * 2),
                                    i == 0 ? add : 1);
    }
    ptx::wgmma_commit();
  }
  /// Sums of groups of columns, times their scales.
  __device__ __forceinline__ void add_groups(float (&s)[kN / 2],
                                             const float (&sums)[kApart ? kGroups : 1][kN / 2],
                                             std::uint32_t keys) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 scales = scales_of(keys, half);
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        const int at = i / 2 * 4 + i % 2 + 2 * half;
        const float sum =
            fmaf(sums[3][at], scales.w,
                 fmaf(sums[2][at], scales.z, fmaf(sums[1][at], scales.y, sums[0][at] * scales.x)));
        s[at] = fmaf(sum, query_factors(i / 2)[i % 2], s[at]);
      }
    }
  }
  /// Of the thread's two rows of eight.
  __device__ __forceinline__ const float* query_factors(int eight) const {
    return shared_.scales.query_factors + 8 * eight + lane_ % 4 * 2;
  }

  /// Both warpgroups will multiply the block's values by these.
  __device__ __forceinline__ void tell_shares(std::uint32_t keys, const float (&most)[2]) const {
    const int group = lane_ % 4, key = lane_ / 4;  // of 8
    std::uint32_t(&to)[2] = shared_.scales.shares[group][key / 2][warp_];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float share = scale_at(keys, half)[group] * inverse(most[half]);
      reinterpret_cast<std::uint16_t*>(&to[half])[key % 2] =
          static_cast<std::uint16_t>(ptx::pack<Dtype::f16>(share, share));
    }
  }
  __device__ __forceinline__ const float* scale_at(std::uint32_t keys, int half) const {
    const std::uint32_t buffer = keys - ptx::shared_address(shared_.ring);
    const char* const scales = shared_.ring[0] + buffer + latent_chunks(K) * kChunk;
    return reinterpret_cast<const float*>(scales) + (warp_ * 16 + lane_ / 4 + 8 * half) * kGroups;
  }
  __device__ __forceinline__ float4 scales_of(std::uint32_t keys, int half) const {
    static_assert(kGroups == 4);
    return *reinterpret_cast<const float4*>(scale_at(keys, half));
  }
  __device__ __forceinline__ static float greatest(const float4& x) {
    return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
  }
  /// Of scales that are all 0 or NaN, which stay that: 1.
  __device__ __forceinline__ static float inverse(float most) {
    return most > 0.0F ? 1.0F / most : 1.0F;
  }

  LatentShared<K>& shared_;
  /// Made anew each time: else addresses are known before the first block, and take registers.
  const int thread_, warp_ = thread_ / 32 % 4, lane_ = thread_ % 32;
};

}  // namespace tessera::cuda::sm90
