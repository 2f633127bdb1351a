// Scores of the backward by mma.sync (backward.h): which of them a warp makes weights of, and what
// warps tell each other of them through shared memory.
//
//   exchange  P^T, and with extras the scores' derivatives: from one role to its partner, in fp32,
//             as it lies in registers
//   scores    dS^T: to all, for dQ. 16 bits, a row a key
//   weights   P^T, so, to all that share keys
//   partials  sums over the columns of a warp that shares keys: to the others of its team, each of
//             which makes weights of 16 keys and some of the queries
#pragma once

#include "cuda/mma/backward_tile.h"
#include "cuda/tile/extras.h"

namespace tessera::cuda::mma {

template <core::Kernel K, Role kRole>
class BackwardScores : protected BackwardTile<K, kRole> {
 protected:
  using Tile = BackwardTile<K, kRole>;
  using Tile::kValues, Tile::kBoth, Tile::kM, Tile::kN, Tile::kOwn, Tile::kParts, Tile::kGroups,
      Tile::kRoleThreads;
  using Tile::lane, Tile::part, Tile::team, Tile::m_, Tile::tile_;
  using typename Tile::Rows;
  static constexpr bool kExtras = K.extra == core::Extra::all;

  /// Warps of a team that have the same 16 keys, each other queries.
  static constexpr int kSlices = kParts > 1 ? kParts / kGroups : 1;
  static constexpr int kScoreGroups = kParts > 1 ? 1 : kGroups;  ///< of 16 keys
  /// Queries whose scores a warp has at a time: where it has both roles there are registers for no
  /// more than 32.
  static constexpr int kQueries = kBoth ? 32 : kM / kSlices;
  static constexpr int kScores = kQueries / 2;  ///< of a thread and group

  static_assert(kSlices * kGroups == kParts || kParts == 1);
  static_assert(!kExtras || (!kBoth && kScoreGroups == 1));

  __device__ __forceinline__ BackwardScores(const BackwardParams& params,
                                            const BackwardMemory<K>& memory, KeyTile& tile)
      : Tile(params, memory, tile) {}

  // ---- places of the warp's scores, counted in the block; of a thread the first, others are 8
  // keys or queries apart ----

  __device__ __forceinline__ static int score_keys() {
    return team() * kOwn + (kParts > 1 ? part() / kSlices * 16 : 0);
  }
  __device__ __forceinline__ static int score_queries() {
    return kSlices > 1 ? part() % kSlices * kQueries : 0;
  }
  __device__ __forceinline__ int first_score_key() const {
    return tile_.first_key + score_keys() + lane() / 4;
  }
  __device__ __forceinline__ static int first_score_query() {
    return score_queries() + lane() % 4 * 2;
  }
  __device__ __forceinline__ ScorePlace place_of(Rows rows) const {
    return {tile_.sequence.batch, rows.head,           rows.m * kM + first_score_query(),
            first_score_key(),    tile_.band.seqlen_q, tile_.band.seqlen_k};
  }

  // ---- sums over the columns of a team ----

  static constexpr int kWords = kScores / 4;  ///< of 16 bytes, of a lane's scores of 16 keys
  static constexpr int kLines = kParts > 1 ? (kParts - 1) * kWords : 1;  ///< of words for a warp

  /// The i-th line of words for one of the team.
  __device__ __forceinline__ std::uint32_t partial_place(int of, int i) const {
    const int team = (kValues ? 0 : kN / kOwn) + this->team();
    return m_.partials + ((team * kParts + of) * kLines + i) * 512 + lane() * 16;
  }
  /// What the warp's columns add to scores of the team's keys and 16 queries from `first` on: to
  /// its own, which begin so, or for the others.
  __device__ __forceinline__ void give_partial(const float (&x)[kGroups][8], int first,
                                               float (&sum)[kScores]) const {
    const int own = part();
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i) {
      const int word = first / 8 + i % 2;  // of all queries
      const int of = i / 2 * kSlices + word / kWords;
      const float* const from = x[i / 2] + i % 2 * 4;
      if (of == own) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[word % kWords * 4 + j] = from[j];
      } else {
        const int line = (own - (own > of ? 1 : 0)) * kWords + word % kWords;
        ptx::store_shared(partial_place(of, line), from[0], from[1], from[2], from[3]);
      }
    }
  }
  /// The others' sums are added.
  __device__ __forceinline__ void take_partials(float (&sum)[kScores]) const {
    Tile::meet_team();
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      float x[4];
      ptx::load_shared(partial_place(part(), i), x[0], x[1], x[2], x[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i % kWords * 4 + j] += x[j];
    }
  }

  // ---- from one role to its partner ----

  __device__ __forceinline__ std::uint32_t weights_place() const {
    return m_.exchange + threadIdx.x % kRoleThreads * 16;
  }
  __device__ __forceinline__ void give_weights(const float (&s)[kScoreGroups][kScores]) const {
#pragma unroll
    for (int i = 0; i < kScoreGroups * kScores / 4; ++i) {
      const float* const x = s[i / (kScores / 4)] + i % (kScores / 4) * 4;
      ptx::store_shared(weights_place() + i * kRoleThreads * 16, x[0], x[1], x[2], x[3]);
    }
  }
  /// Of the g-th 16 keys and the c-th 8 queries.
  __device__ __forceinline__ void take_weights(int g, int c, float (&w)[4]) const {
    ptx::load_shared(weights_place() + (g * (kScores / 4) + c) * kRoleThreads * 16, w[0], w[1],
                     w[2], w[3]);
  }

  static constexpr int kSlopeWords = core::min(4, kScores / 2);  ///< of a thread side by side

  __device__ __forceinline__ std::uint32_t slopes_place() const {
    return m_.exchange + kN * kM * 4 + threadIdx.x % kRoleThreads * kSlopeWords * 4;
  }
  __device__ __forceinline__ void give_slopes(const std::uint32_t (&slopes)[kScores / 2]) const {
    if constexpr (kSlopeWords == 4) {
#pragma unroll
      for (int i = 0; i < kScores / 2; i += 4) {
        ptx::store_shared(slopes_place() + i / 4 * kRoleThreads * 16,
                          {slopes[i], slopes[i + 1], slopes[i + 2], slopes[i + 3]});
      }
    } else {
      static_assert(kScores / 2 == kSlopeWords);
#pragma unroll
      for (int i = 0; i < kSlopeWords; ++i) ptx::store_shared(slopes_place() + i * 4, slopes[i]);
    }
  }
  /// The i-th two words of them.
  __device__ __forceinline__ void take_slopes(int i, std::uint32_t (&slopes)[2]) const {
    float words[2];
    ptx::load_shared(slopes_place() + i / 2 * kRoleThreads * 16 + i % 2 * 8, words[0], words[1]);
    slopes[0] = __float_as_uint(words[0]);
    slopes[1] = __float_as_uint(words[1]);
  }

  // ---- rows of 16 bits, one a key: units of eight queries, at their number XOR that of the line
  // of 128 bytes, which has the rows of kLineKeys keys ----

  static constexpr int kLineKeys = 64 / kM;

  __device__ __forceinline__ static std::uint32_t unit_place(std::uint32_t from, int key,
                                                             int unit) {
    const int line = key / kLineKeys;
    return from + line * 128 + ((key % kLineKeys * (kM / 8) + unit) ^ line % 8) * 16;
  }
  /// By what places differ, XOR, of which one is so many keys further, a multiple of eight.
  static constexpr int further(int keys) { return keys / kLineKeys % 8 * 16; }

  /// The warp's own, of queries from `first` on.
  __device__ __forceinline__ void store_units(
      std::uint32_t to, int first, const std::uint32_t (&words)[kScoreGroups][kScores / 2]) const {
    const int lane = this->lane();
    to = unit_place(to, score_keys() + lane / 4, (score_queries() + first) / 8) + lane % 4 * 4;
#pragma unroll
    for (int g = 0; g < kScoreGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        ptx::store_shared((to ^ (i / 2 * 16 ^ further(i % 2 * 8))) + (g * 16 + i % 2 * 8) * kM * 2,
                          words[g][i]);
      }
    }
  }
  /// Where the lane's row of the first operand of the team's keys lies, for load_units.
  __device__ __forceinline__ std::uint32_t units_of_team(std::uint32_t from) const {
    const int lane = this->lane();
    return unit_place(from, team() * kOwn + lane % 16, lane / 16);
  }
  /// The g-th 16 of the team's keys and the j-th 16 queries.
  __device__ __forceinline__ static void load_units(std::uint32_t from, int g, int j,
                                                    std::uint32_t (&a)[4]) {
    ptx::load_matrices(a, (from ^ (j * 32 ^ further(g * 16))) + g * 16 * kM * 2);
  }
  /// Where the lane's row of the first operand with some of the queries, transposed, lies: those
  /// from the unit on.
  __device__ __forceinline__ std::uint32_t units_of_queries(std::uint32_t from, int unit) const {
    const int lane = this->lane();
    return unit_place(from, lane / 16 * 8 + lane % 8, unit + lane / 8 % 2);
  }
};

}  // namespace tessera::cuda::mma
