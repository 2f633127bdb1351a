// Products of keys and queries of the latent kernel (latent.h) where values are of 8 bits beside
// keys of 16 (S14), as in FlashMLA's rows of 656 bytes: 512 values of e4m3, a scale for each 128 of
// them, 64 columns of keys. A warpgroup makes those of a block of keys by itself. Keys are wgmma's
// first operand, which comes from registers, or from shared memory where they lie in chunks.
//
// Queries of bf16 that meet values become sums of two e4m3 each, times a power of two of their row,
// as each of these has 4 of their 8 bits; so values are multiplied as they lie. Queries of fp16
// have 11 bits: values become fp16 in registers, which holds them exactly, and so do queries stay,
// times a power of two.
#pragma once

#include "cuda/mma/decode_widened.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/latent_scores.h"

namespace tessera::cuda::sm90 {

/// What both have: where a block's rows and scales lie, and keys of 16 bits.
template <core::Kernel K>
class LatentProducts : protected LatentScores<K> {
  using Scores = LatentScores<K>;

 protected:
  using Scores::kKeys, Scores::kN;
  using Scores::p, Scores::shared_, Scores::warp, Scores::lane, Scores::s_;
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kGroups = latent_groups(K);
  /// Bytes of a chunk of queries, and of one of a block of keys.
  static constexpr std::uint32_t kQueryChunk = kN * 128, kKeyChunk = kKeys * 128;

  using Scores::Scores;

  /// Begins S^T = or += K Q^T, of columns of 16 bits.
  __device__ __forceinline__ void multiply_rotated(std::uint32_t keys, std::uint32_t queries,
                                                   int add) {
    using Wgmma = ptx::Wgmma<kType, kN>;
    const std::uint32_t b = ptx::descriptor_along(queries);
    constexpr int kSteps = K.head_dim / 16;
    if constexpr (latent_chunked(K)) {
      const std::uint32_t a = ptx::descriptor_along(keys + K.head_dim_v / 128 * kKeyChunk);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Wgmma::shared(s_, ptx::descriptor(a + i * 2), ptx::descriptor(b + i * 2), i == 0 ? add : 1);
      }
    } else {
      std::uint32_t a[kSteps][4];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        ptx::load_matrices(a[i], own_rows(keys) + latent_key_at(K) + i * 32);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Wgmma::registers(s_, a[i], ptx::descriptor(b + i * 2), i == 0 ? add : 1);
      }
    }
    ptx::wgmma_commit();
  }
  /// The first 16 bytes of a row, or those beside them, as ldmatrix takes them.
  __device__ __forceinline__ static std::uint32_t own_rows(std::uint32_t keys) {
    const int lane = Scores::lane();
    return keys + (Scores::warp() * 16 + lane % 16) * latent_row_bytes(K) + lane / 16 * 16;
  }
  /// Of the thread's two rows of eight.
  __device__ __forceinline__ const float* query_factors(int eight) const {
    return shared_.roles.query_factors + 8 * eight + lane() % 4 * 2;
  }

  // ---- scales ----

  /// Of a block's keys, the lane's half-th.
  __device__ __forceinline__ const float* scale_at(std::uint32_t keys, int half) const {
    const char* const rows = shared_.ring[0] + (keys - ptx::shared_address(shared_.ring));
    constexpr int kApart = latent_chunked(K) ? 4 * kGroups : latent_row_bytes(K);
    const int row = warp() * 16 + lane() / 4 + 8 * half;
    return reinterpret_cast<const float*>(rows + row * kApart + latent_scales_at(K));
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
};

/// Products by type of queries, for LatentScorer.
template <core::Kernel K, Dtype kType = core::dtype_of(K.operand)>
class LatentKeyProducts;

/// The sums of a group of columns are made by 8-bit tensor cores, whose accumulators keep 13 bits
/// behind the first (reference/emulation.h), and go on in fp32, times its scales.
template <core::Kernel K>
class LatentKeyProducts<K, Dtype::bf16> : protected LatentProducts<K> {
  using Base = LatentProducts<K>;
  using Base::kQueryChunk, Base::kKeyChunk;
  /// Products of both parts of queries lie side by side where registers suffice, and are added up
  /// later.
  static constexpr bool kSideBySide = Base::kN <= 32;
  static constexpr int kColumns = kSideBySide ? 2 * Base::kN : Base::kN;
  static constexpr int kSteps = core::kScaledColumns / 32;  ///< of a group of columns
  /// Groups whose products are made while sums of one before are added up.
  static constexpr int kAhead = Base::kN > 32 ? 0 : 1;
  using Wgmma = ptx::Wgmma<Dtype::e4m3, kColumns>;
  static_assert(core::kScaledColumns == 128 && K.head_dim == 64);

 protected:
  using Base::Base;
  using Base::kGroups, Base::kN, Base::lane, Base::s_;

  /// Rows that a warp prepares side by side: 8 lanes have one.
  static constexpr int kPreparedAtOnce = 4;
  /// A warp makes two e4m3 of each element of rows that meet values, the greater one to where the
  /// first half of its group of 128 columns was; those that meet keys are multiplied by the same
  /// power of two. chunks: of all queries.
  __device__ __forceinline__ void prepare_queries(char* chunks, int first) const {
    const int lane = this->lane(), row = first + lane / 8, unit = lane % 8;
    const auto at = [&](int chunk, int byte) {
      return chunks + chunk * kQueryChunk + row * 128 + (byte / 16 ^ row % 8) * 16 + byte % 16;
    };
    std::uint32_t most_of_keys = greatest_bits(at(0, unit * 16)), most = 0;
#pragma unroll
    for (int c = 1; c <= 2 * kGroups; ++c) most = core::max(most, greatest_bits(at(c, unit * 16)));
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      most = core::max(most, __shfl_xor_sync(~0U, most, distance));
      most_of_keys = core::max(most_of_keys, __shfl_xor_sync(~0U, most_of_keys, distance));
    }
    const mma::PowerOfTwo power =
        mma::PowerOfTwo::of(__uint_as_float(most), kTop, __uint_as_float(most_of_keys));
    // e4m3 has no infinity: what has one becomes NaN.
    const float factor = most == kInfinityBits ? __uint_as_float(kNanBits) : power.factor;
    scale_keys(at(0, unit * 16), factor);
#pragma unroll 1
    for (int chunk = 1; chunk <= 2 * kGroups; chunk += 2) {
      uint2 parts[2][2];
      split(at(chunk, unit * 16), factor, parts[0]);
      split(at(chunk + 1, unit * 16), factor, parts[1]);
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<uint2*>(at(chunk + i, half * 64 + unit * 8)) = parts[half][i];
        }
      }
    }
    if (unit == 0) this->shared_.roles.query_factors[row] = power.inverse * this->p.score.pre;
  }

  /// S^T of a block.
  __device__ __forceinline__ void multiply_keys(std::uint32_t keys, std::uint32_t queries) {
    this->multiply_rotated(keys, queries, 0);
    Values values[2];
    float sums[kAhead + 1][kColumns / 2];
    load(values[0], keys, 0);
#pragma unroll
    for (int group = 0; group < kGroups + kAhead; ++group) {
      if (group < kGroups) {
        multiply_group(group, sums[group % (kAhead + 1)], values[group % 2],
                       ptx::descriptor_along(keys + group * kKeyChunk),
                       ptx::descriptor_along(queries + kQueryChunk));
      }
      if (group < kGroups) {
        ptx::wgmma_wait<kAhead>();
      } else {
        ptx::wgmma_wait<0>();
      }
      if (group == 0) ptx::wgmma_results(s_);
      const int done = group - kAhead;
      if (done >= 0) add_group(done, sums[done % (kAhead + 1)], keys);
      if (group + 1 < kGroups) load(values[(group + 1) % 2], keys, group + 1);
    }
  }

 private:
  static constexpr int kTop = 7;  ///< a row's greatest query is less than 2^8
  static constexpr std::uint32_t kInfinityBits = 0x7F800000U, kNanBits = 0x7FC00000U;

  /// Of 8 elements the bits of the greatest size, which are ordered as integers; a NaN is greater
  /// than all.
  __device__ __forceinline__ static std::uint32_t greatest_bits(const char* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    constexpr std::uint32_t kUpper = 0x7FFF0000U;
    std::uint32_t most = 0;
    for (const std::uint32_t word : {words.x, words.y, words.z, words.w}) {
      most = core::max(most, core::max(word << 16 & kUpper, word & kUpper));
    }
    return most;
  }
  /// 8 elements times a power of two.
  __device__ __forceinline__ static void scale_keys(char* at, float factor) {
    auto& words = *reinterpret_cast<uint4*>(at);
    uint4 scaled = words;
    for (std::uint32_t* const word : {&scaled.x, &scaled.y, &scaled.z, &scaled.w}) {
      float x[2];
      unpack<Dtype::bf16>(*word, x);
      *word = ptx::pack<Dtype::bf16>(x[0] * factor, x[1] * factor);
    }
    words = scaled;
  }
  /// The same as sums of two e4m3.
  __device__ __forceinline__ static void split(const char* from, float factor, uint2 (&parts)[2]) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    split(words.x, words.y, factor, parts[0].x, parts[1].x);
    split(words.z, words.w, factor, parts[0].y, parts[1].y);
  }
  __device__ __forceinline__ static void split(std::uint32_t low, std::uint32_t high, float factor,
                                               std::uint32_t& rounded, std::uint32_t& rest) {
    float x[4], less[4];
    unpack<Dtype::bf16>(low, x);
    unpack<Dtype::bf16>(high, x + 2);
#pragma unroll
    for (float& element : x) element *= factor;
    rounded = ptx::pack_e4m3(x[0], x[1], x[2], x[3]);
    std::uint32_t words[2];
    ptx::widen_four<Dtype::e4m3>(rounded, words[0], words[1]);
    unpack<Dtype::f16>(words[0], less);
    unpack<Dtype::f16>(words[1], less + 2);
    rest = ptx::pack_e4m3(x[0] - less[0], x[1] - less[1], x[2] - less[2], x[3] - less[3]);
  }
  template <Dtype kPair>
  __device__ __forceinline__ static void unpack(std::uint32_t pair, float* x) {
    x[0] = ptx::widen<kPair>(static_cast<std::uint16_t>(pair));
    x[1] = ptx::widen<kPair>(static_cast<std::uint16_t>(pair >> 16));
  }

  /// A group of columns of the warp's 16 keys, where they are not multiplied as they lie.
  struct Values {
    std::uint32_t words[latent_chunked(K) ? 1 : kSteps][4];
  };
  __device__ __forceinline__ static void load(Values& values, std::uint32_t keys, int group) {
    if constexpr (!latent_chunked(K)) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::load_matrices(values.words[step],
                           Base::own_rows(keys) + group * core::kScaledColumns + step * 32);
      }
    }
  }
  /// Begins the sums of a group of columns. keys: the group's chunk, queries: all their chunks.
  __device__ __forceinline__ static void multiply_group(int group, float (&sums)[kColumns / 2],
                                                        const Values& values, std::uint32_t keys,
                                                        std::uint32_t queries) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < (kSideBySide ? 1 : 2); ++part) {
        const std::uint64_t b =
            ptx::descriptor(queries + ((2 * group + part) * kQueryChunk + step * 32) / 16);
        const int adds = step + part > 0 ? 1 : 0;
        if constexpr (latent_chunked(K)) {
          Wgmma::shared(sums, ptx::descriptor(keys + step * 2), b, adds);
        } else {
          Wgmma::registers(sums, values.words[step], b, adds);
        }
      }
    }
    ptx::wgmma_commit();
  }
  /// Sums of a group of columns, times its scales, to those of all.
  __device__ __forceinline__ void add_group(int group, float (&sums)[kColumns / 2],
                                            std::uint32_t keys) {
    ptx::wgmma_results(sums);
    const float scales[2] = {this->scale_at(keys, 0)[group], this->scale_at(keys, 1)[group]};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float sum = kSideBySide ? sums[i] + sums[kColumns / 4 + i] : sums[i];
      s_[i] = fmaf(sum, scales[i / 2 % 2], s_[i]);
    }
  }
};

/// A key's scales by groups of columns are multiplied with the sums of each
/// group where there are few rows. Where registers do not suffice for that, elements are multiplied
/// by the scale of their group over the greatest of their key, and the key's score by that one.
template <core::Kernel K>
class LatentKeyProducts<K, Dtype::f16> : protected LatentProducts<K> {
  using Base = LatentProducts<K>;
  using Base::kQueryChunk, Base::own_rows, Base::query_factors, Base::multiply_rotated;
  using Wgmma = ptx::Wgmma<Dtype::f16, Base::kN>;
  static constexpr int kUnits = 8;  ///< of 16 columns of 8 bits, in a chunk
  /// So many times 16 columns of keys become operands while those before are multiplied.
  static constexpr int kAtOnce = Base::kN == 32 ? 8 : 2;
  /// Whether groups of columns have sums of their own, which scales are multiplied with.
  static constexpr bool kApart = Base::kN == 16;
  static_assert(core::kScaledColumns == kUnits * 16);

 protected:
  using Base::Base;
  using Base::kGroups, Base::kN, Base::lane, Base::s_;
  using Base::scale_at, Base::scales_of, Base::greatest, Base::inverse;

  static constexpr int kPreparedAtOnce = 1;  ///< row
  /// A warp makes a row that meets values fp16, times a power of two. chunks: of all queries.
  __device__ __forceinline__ void prepare_queries(char* chunks, int row) const {
    const float factor = mma::widen_queries<K.head_dim_v>(Base::kType, [&](int word) {
      // Else places of all words are known before the first piece, and take registers.
      const std::uint32_t at = ptx::opaque(static_cast<std::uint32_t>(word));
      char* const line = chunks + (1 + at / 32) * kQueryChunk + row * 128;
      return reinterpret_cast<std::uint32_t*>(line + (at / 4 % 8 ^ row % 8) * 16) + at % 4;
    });
    if (lane() == 0) this->shared_.roles.query_factors[row] = factor;
  }

  /// S^T of a block.
  __device__ __forceinline__ void multiply_keys(std::uint32_t keys, std::uint32_t queries) {
    float most[2] = {1.0F, 1.0F};
    std::uint32_t shares[kGroups][2];
    if constexpr (kApart) {
      multiply_rotated(keys, queries, 0);
    } else {
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
    const std::uint32_t to = ptx::descriptor_along(queries + kQueryChunk);
    constexpr int kBatches = kGroups * kUnits / kAtOnce, kOfGroup = kUnits / kAtOnce;
    std::uint32_t words[2][kAtOnce / 2][4], a[2][4 * kAtOnce];
    // Of a group and of the one before, and of all groups; not used where they are not apart.
    float sums[2][kN / 2], all[kN / 2];
    load_values(words[0], keys, 0);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      std::uint32_t* const now = a[batch % 2];
      const int group = batch / kOfGroup;
      if (batch >= 2) ptx::wgmma_wait<1>();
      // Of batches before the last one all is done.
      if (kApart && batch >= 2 && (batch - 2) % kOfGroup == kOfGroup - 1) {
        add_group((batch - 2) / kOfGroup, all, sums[(batch - 2) / kOfGroup % 2], keys);
      }
      if (batch + 1 < kBatches) load_values(words[(batch + 1) % 2], keys, (batch + 1) * kAtOnce);
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
        Wgmma::registers(kApart ? sums[group % 2] : s_, now + 4 * i,
                         ptx::descriptor(to + (step / 4 * kQueryChunk + step % 4 * 32) / 16),
                         (kApart ? step % kUnits : step) != 0);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
    if constexpr (kApart) {
      if constexpr (kOfGroup == 1) add_group(kGroups - 2, all, sums[(kGroups - 2) % 2], keys);
      add_group(kGroups - 1, all, sums[(kGroups - 1) % 2], keys);
      ptx::wgmma_results(s_);
      const float* const factors = query_factors(0);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s_[i] = fmaf(all[i], factors[i / 4 * 8 + i % 2], s_[i]);
    } else {
      ptx::wgmma_results(s_);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) s_[i] *= most[i / 2 % 2] * query_factors(i / 4)[i % 2];
      multiply_rotated(keys, queries, 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(s_);
    }
  }

 private:
  /// Values of the warp's 16 keys, of units of 16 columns from one on.
  __device__ __forceinline__ void load_values(std::uint32_t (&words)[kAtOnce / 2][4],
                                              std::uint32_t keys, int unit) const {
#pragma unroll
    for (int i = 0; i < kAtOnce / 2; ++i) {
      ptx::load_matrices(words[i], own_rows(keys) + (unit + 2 * i) * 16);
    }
  }
  /// Sums of a group of columns, times its scales, to those of all.
  __device__ __forceinline__ void add_group(int group, float (&all)[kN / 2], float (&sums)[kN / 2],
                                            std::uint32_t keys) const {
    ptx::wgmma_results(sums);
    const float scales[2] = {scale_at(keys, 0)[group], scale_at(keys, 1)[group]};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const float scale = scales[i / 2 % 2];
      all[i] = group == 0 ? sums[i] * scale : fmaf(sums[i], scale, all[i]);
    }
  }
};

}  // namespace tessera::cuda::sm90
