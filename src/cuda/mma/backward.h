// The backward pass by mma.sync (Dao 2023, algorithm 2): a block of threads takes one block of keys
// after another; its dK and dV stay in registers while it walks over all blocks of rows that see
// it, those of every query head of its group. All products that it sums have keys as rows, so that
// weights are operands as they lie in registers:
//   S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q
// and dS^T goes through shared memory, once, for dQ += dS K, which is summed in fp32 in global
// memory (backward_finish.h makes dQ of it).
//
// A warp has tile_m keys. Where registers suffice (core::splits_roles) it does all of it, 32
// queries at a time; elsewhere, and with extras, it has one of two roles, and its partner of the
// other half the same keys:
//   values:  S^T, P^T    dV    dQ, half of the rows
//   keys:    dP^T, dS^T  dK    dQ, the others
// P^T goes from one to the other in fp32, as it lies in registers. What ldmatrix brings is shared
// by twice as many products where a warp has 32 keys.
//
// Where outputs are wider than that, a team of warps (core::mma_parts) shares keys. Each has some
// of the columns: it sums over those for S^T and dP^T, whose keys and values stay in its registers,
// and has those of dV and dK. Sums pass through shared memory; then each makes weights of some of
// the scores, which all need (backward_scores.h).
#pragma once

#include "cuda/mma/backward_scores.h"
#include "cuda/tile/backward_extras.h"

namespace tessera::cuda::mma {

template <core::Kernel K, Role kRole>
class Backward : BackwardScores<K, kRole> {
  using Tile = BackwardTile<K, kRole>;
  using Scores = BackwardScores<K, kRole>;
  using Scores::kExtras, Scores::kScoreGroups, Scores::kQueries, Scores::kScores;
  using Scores::place_of;
  using Tile::kValues, Tile::kKeys, Tile::kBoth, Tile::kM, Tile::kN, Tile::kOwn, Tile::kD,
      Tile::kDv, Tile::kParts, Tile::kGroups, Tile::kThreads, Tile::kHeld;
  using Tile::meet, Tile::meet_own, Tile::lane, Tile::part, Tile::team, Tile::turn, Tile::take_turn,
      Tile::pass_turn, Tile::after, Tile::queries_of, Tile::gradients_of, Tile::load_queries,
      Tile::load_gradients;
  using Tile::p, Tile::m_, Tile::tile_;
  using typename Tile::Rows;
  static constexpr Dtype kType = core::dtype_of(K.operand);
  // dQ is shared out among all warps: half of the rows, or all, and of pieces of 16 columns every
  // kColumnWarps-th, each.
  static constexpr int kHalves = kParts > 1 ? 1 : 2;
  static constexpr int kQueryGroups = kM / 16 / kHalves;  ///< of 16 rows
  static constexpr int kColumnWarps = kThreads / 32 / kHalves, kPieces = kD / 16 / kColumnWarps;
  /// Pieces of 16 columns that are made at a time: as many as there are registers for.
  static constexpr int kAtOnce = kParts > 1 ? 1 : kPieces > 3 ? 2 : kPieces;
  // Buffers of what this role fetches, and of what the other does.
  static constexpr int kBuffers = kValues ? K.stages : K.q_stages;
  static constexpr int kOthers = kValues ? K.q_stages : K.stages;
  // Named barriers, beside those of Tile: of what one role tells the other.
  static constexpr int kWeightsReady = 4, kScoresReady = 5, kFetched = 6;

  static_assert(kPieces * kColumnWarps * 16 == kD && kPieces % kAtOnce == 0);
  static_assert(kBoth != core::splits_roles(K) && (kParts == 1 || !kBoth));
  static_assert(!kBoth || (K.q_stages == 2 && K.stages == 1));

 public:
  __device__ __forceinline__ Backward(const BackwardParams& params, const BackwardMemory<K>& memory,
                                      KeyTile& tile)
      : Scores(params, memory, tile) {}

  __device__ __forceinline__ void run() {
    for (;;) {
      meet();  // all have read what was said of the last block
      if (threadIdx.x == 0) this->take_tile();
      meet();
      if (!agreed(tile_.first_key >= 0)) return;
      compute();
    }
  }

 private:
  // ---- a block of keys ----

  __device__ __forceinline__ void compute() {
    if constexpr (kValues) clear(dv_);
    if constexpr (kKeys) clear(dk_);
    const Rows first = {tile_.head * p.group, tile_.queries.seen.begin};
    const bool seen = agreed(!tile_.queries.seen.empty());
    if (seen) {
      this->load_keys();
      if constexpr (kKeys) load_queries(0, first);
      if constexpr (kValues) load_gradients(0, first);
      ptx::copy_commit();
      if constexpr (kKeys && kHeld > 0) this->hold(p.v, p.head_dim_v, held_);
      if constexpr (kParts > 1 && kValues) this->hold(p.k, p.head_dim, held_);
      if constexpr (kBoth) {
        walk(first);
      } else {
        walk_in_role(first);
      }
    }
    write();
  }

  // ---- blocks of rows, where a warp has both roles ----

  __device__ __forceinline__ void walk(Rows rows) {
#pragma unroll 1
    for (int i = 0; agreed(rows.head >= 0); ++i) {
      ptx::copy_wait<0>();
      meet();  // rows are there; dS^T has been read
      load_queries(i + 1, after(rows));
      ptx::copy_commit();
      const bool masked = is_masked(rows.m);
#pragma unroll
      for (int first = 0; first < kM; first += kQueries) {
        multiply<kD, 0>(s_, m_.k, queries_of(i) + first * 128);
        weigh(i, rows, first, masked);
        multiply<kDv, kHeld>(ds_, m_.v, gradients_of(i) + first * 128);
        differentiate(i, rows, first, masked);
        this->store_units(m_.scores, first, operand_);
        add_values(gradients_of(i) + first * 128);
        add_keys(queries_of(i) + first * 128);
      }
      take_turn(rows);
      meet();  // dS^T is there; dO has been read
      load_gradients(i + 1, after(rows));
      ptx::copy_commit();
      add_queries(rows);
      pass_turn();
      rows = after(rows);
    }
  }

  // ---- the same where it has one ----

  // The values fetch dO for both, and the keys Q. Where there are two buffers, those of the step
  // after the next are asked for when those of this one have been read, and are waited for a step
  // later, before one role tells the other what it waits for anyway. Where there is one, the other
  // role is told in words of its own.

  __device__ __forceinline__ void walk_in_role(Rows rows) {
    ptx::copy_wait<0>();
    meet();
    if constexpr (kBuffers > 1) fetch(1, after(rows));
#pragma unroll 1
    for (int i = 0; agreed(rows.head >= 0); ++i) {
      if constexpr (kOthers == 1) {
        if (i > 0) ptx::barrier_sync(kFetched + (kValues ? 0 : 1), kThreads);
      }
      if constexpr (kValues) {
        score<kD, (kParts > 1 ? kHeld : 0)>(s_, m_.k, queries_of(i));
        weigh(i, rows, 0, is_masked(rows.m));
        this->give_weights(s_);
        ptx::copy_wait<0>();
        ptx::barrier_arrive(kWeightsReady, kThreads);
        if constexpr (kBuffers < kOthers) meet_own();  // dO that the others have fetched is there
        if constexpr (kExtras) drop(p, place_of(rows), s_[0]);
        if constexpr (kParts > 1) {
          store_weights();
          Tile::meet_team();
        }
        add_values(gradients_of(i));
        take_turn(rows);
        ptx::barrier_sync(kScoresReady, kThreads);
      } else {
        score<kDv, kHeld>(ds_, m_.v, gradients_of(i));
        if constexpr (kExtras) drop(p, place_of(rows), ds_[0]);
        ptx::barrier_sync(kWeightsReady, kThreads);
        differentiate(i, rows, 0, is_masked(rows.m));
        this->store_units(m_.scores, 0, operand_);
        ptx::copy_wait<0>();
        ptx::barrier_arrive(kScoresReady, kThreads);
        if constexpr (kParts > 1) Tile::meet_team();  // dS^T of its keys is there
        add_keys(queries_of(i));
        take_turn(rows);
        meet_own();
      }
      // All warps of this role are done with this step's of what it fetches, and the other's, too.
      fetch(i + kBuffers, kBuffers == 1 ? after(rows) : after(after(rows)));
      add_queries(rows);
      pass_turn();
      rows = after(rows);
      if constexpr (kBuffers == 1) {
        ptx::copy_wait<0>();
        if (agreed(rows.head >= 0)) {
          ptx::barrier_arrive(kFetched + (kValues ? 1 : 0), kThreads);
        }
      }
    }
  }

  /// What this role fetches of the i-th rows.
  __device__ __forceinline__ void fetch(int i, Rows rows) const {
    if constexpr (kValues) {
      load_gradients(i, rows);
    } else {
      load_queries(i, rows);
    }
    ptx::copy_commit();
  }

  template <int kCount>
  __device__ __forceinline__ static void clear(float (&x)[kGroups][kCount]) {
#pragma unroll
    for (int i = 0; i < kGroups * kCount; ++i) x[i / kCount][i % kCount] = 0.0F;
  }

  // ---- products ----

  // Places are made anew for every product: kept, those of all buffers would take dozens of
  // registers.

  /// The lane's place in 16 rows of 16 columns, for ldmatrix: of an operand with these rows, or,
  /// transposed, with these columns.
  __device__ __forceinline__ std::uint32_t along() const {
    const std::uint32_t lane = ptx::opaque(threadIdx.x) % 32;
    return lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
  }
  /// The same of an operand that is multiplied by its rows.
  __device__ __forceinline__ std::uint32_t across() const {
    const std::uint32_t lane = ptx::opaque(threadIdx.x) % 32;
    return (lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
  }

  /// Where the warp's i-th piece of 16 columns of a block of rows lies, from its first one on.
  __device__ __forceinline__ static std::uint32_t piece(std::uint32_t first, int i) {
    return (first ^ i * kParts % 4 * 32) + i * kParts / 4 * kM * 128;
  }

  /// D = A B^T of the warp's keys and a block of rows. The first kFromRegisters columns of A are
  /// held_.
  template <int kDim, int kFromRegisters, int kCount>
  __device__ __forceinline__ void multiply(float (&d)[kGroups][kCount], std::uint32_t keys,
                                           std::uint32_t rows) const {
    clear(d);
    keys += team() * kOwn * 128 + along();
    rows += across() ^ part() * 32;
#pragma unroll
    for (int i = 0; i < kDim / 16 / kParts; ++i) {
      std::uint32_t a[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if constexpr (kFromRegisters > 0) {
          if (i * 16 < kFromRegisters) {
#pragma unroll
            for (int j = 0; j < 4; ++j) a[g][j] = held_[(g * kFromRegisters / 16 + i) * 4 + j];
            continue;
          }
        }
        const int column = i - kFromRegisters / 16;
        ptx::load_matrices(a[g], (keys ^ column % 4 * 32) + (column / 4 * kN + g * 16) * 128);
      }
#pragma unroll
      for (int j = 0; j < kCount / 8; ++j) {
        std::uint32_t b[4];
        ptx::load_matrices(b, piece(rows, i) + j * 16 * 128);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          ptx::mma<kType>(d[g] + j * 8, a[g], b[0], b[1]);
          ptx::mma<kType>(d[g] + j * 8 + 4, a[g], b[2], b[3]);
        }
      }
    }
  }
  /// The same of the warp's own scores: a team sums over the columns of all its warps.
  template <int kDim, int kFromRegisters>
  __device__ __forceinline__ void score(float (&d)[kScoreGroups][kScores], std::uint32_t keys,
                                        std::uint32_t rows) const {
    if constexpr (kParts == 1) {
      multiply<kDim, kFromRegisters>(d, keys, rows);
    } else {
#pragma unroll
      for (int first = 0; first < kM; first += 16) {
        float partial[kGroups][8];
        multiply<kDim, kFromRegisters>(partial, keys, rows + first * 128);
        this->give_partial(partial, first, d[0]);
      }
      this->take_partials(d[0]);
    }
  }

  /// D += A B of the warp's keys, the operand that operand_of(g, j, a) gives, and rows.
  template <int kDim, class OperandOf>
  __device__ __forceinline__ void add_across(float (&d)[kGroups][kDim / kParts / 2],
                                             std::uint32_t rows, const OperandOf& operand_of) {
    rows += along() ^ part() * 32;
#pragma unroll
    for (int j = 0; j < (kParts > 1 ? kM : kQueries) / 16; ++j) {
      std::uint32_t a[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) operand_of(g, j, a[g]);
#pragma unroll
      for (int i = 0; i < kDim / 16 / kParts; ++i) {
        std::uint32_t b[4];
        ptx::load_matrices_across(b, piece(rows, i) + j * 16 * 128);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          ptx::mma<kType>(d[g] + i * 8, a[g], b[0], b[1]);
          ptx::mma<kType>(d[g] + i * 8 + 4, a[g], b[2], b[3]);
        }
      }
    }
  }
  /// dV += P^T dO.
  __device__ __forceinline__ void add_values(std::uint32_t dout) {
    const std::uint32_t shared = kParts > 1 ? this->units_of_team(m_.weights) : 0;
    add_across<kDv>(dv_, dout, [&](int g, int j, std::uint32_t(&a)[4]) {
      if constexpr (kParts > 1) {
        this->load_units(shared, g, j, a);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = ptx::pack<kType>(s_[g][j * 8 + 2 * i], s_[g][j * 8 + 2 * i + 1]);
        }
      }
    });
  }
  /// dK += dS^T Q.
  __device__ __forceinline__ void add_keys(std::uint32_t q) {
    const std::uint32_t shared = kParts > 1 ? this->units_of_team(m_.scores) : 0;
    add_across<kD>(dk_, q, [&](int g, int j, std::uint32_t(&a)[4]) {
      if constexpr (kParts > 1) {
        this->load_units(shared, g, j, a);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = operand_[g][j * 4 + i];
      }
    });
  }

  /// dQ += dS K: the warp's pieces of it, to memory.
  __device__ __forceinline__ void add_queries(Rows rows) {
    const int warp = static_cast<int>(ptx::opaque(threadIdx.x)) / 32;
    const int half = warp / kColumnWarps, first = warp % kColumnWarps;  // rows; pieces
    float* to = p.rows.dq_of(tile_.first_block + rows.m, rows.head) +
                (first * 8 * kM / 16 + half * kQueryGroups) * 32 + lane();
    const bool stores = p.in_order && turn().rank == 0;  // what is there has not been made 0
    const std::uint32_t scores = this->units_of_queries(m_.scores, half * kQueryGroups * 2);
    const std::uint32_t keys = m_.k + (along() ^ first % 4 * 32) + first / 4 * kN * 128;
#pragma unroll
    for (int c = 0; c < kPieces; c += kAtOnce) {
      float dq[kAtOnce][kQueryGroups][8] = {};
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        std::uint32_t a[kQueryGroups][4];
#pragma unroll
        for (int g = 0; g < kQueryGroups; ++g) {
          ptx::load_matrices_across(
              a[g], (scores ^ (g * 32 ^ Scores::further(j * 16))) + j * 16 * kM * 2);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int column = (c + i) * kColumnWarps;  // in pieces from the warp's first one
          std::uint32_t b[4];
          ptx::load_matrices_across(b, (keys ^ column % 4 * 32) + (column / 4 * kN + j * 16) * 128);
#pragma unroll
          for (int g = 0; g < kQueryGroups; ++g) {
            ptx::mma<kType>(dq[i][g], a[g], b[0], b[1]);
            ptx::mma<kType>(dq[i][g] + 4, a[g], b[2], b[3]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int g = 0; g < kQueryGroups; ++g) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            float* const at = to + (((c + i) * kColumnWarps * 8 + j) * (kM / 16) + g) * 32;
            ptx::add_global_or_store(stores, at, dq[i][g][j]);
          }
        }
      }
    }
  }

  // ---- weights and their gradients ----

  __device__ __forceinline__ bool is_masked(int m) const {
    return agreed(m >= tile_.queries.full.end || m < tile_.queries.full.begin);
  }

  /// S^T becomes P^T, of queries from `first` on.
  __device__ __forceinline__ void weigh(int i, Rows rows, int first, bool masked) {
    if constexpr (kExtras) {
      transform_scores(p, place_of(rows), s_[0],
                       [this](const auto& slopes) { this->give_slopes(slopes); });
    }
    const float factor = kExtras ? 1.0F : p.score.pre;
    const std::uint32_t shifts = m_.shifts + i % K.q_stages * core::mma_statistic_bytes(K) +
                                 first * 4 + Scores::first_score_query() * 4;
#pragma unroll
    for (int c = 0; c < kQueries / 8; ++c) {
      float shift[2];
      ptx::load_shared(shifts + c * 32, shift[0], shift[1]);
#pragma unroll
      for (int g = 0; g < kScoreGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = s_[g][4 * c + j];
          x = ptx::ex2(fmaf(x, factor, -shift[j % 2]));
        }
      }
    }
    if (masked) mask(rows.m * kM + first + Scores::first_score_query());
  }
  /// first: the thread's first query.
  __device__ __forceinline__ void mask(int first) {
    const int first_key = this->first_score_key();
#pragma unroll
    for (int g = 0; g < kScoreGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + g * 16 + 8 * half;
        core::Range rows = tile_.band.queries_of({key, key + 1});
        if (key >= tile_.band.seqlen_k) rows = {0, 0};
        mask_row(s_[g], half, {rows.begin - first, rows.end - first}, 0.0F);
      }
    }
  }

  /// P^T, dropped weights 0, for all that share keys.
  __device__ __forceinline__ void store_weights() const {
    std::uint32_t words[kScoreGroups][kScores / 2];
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      words[0][i] = ptx::pack<kType>(s_[0][2 * i], s_[0][2 * i + 1]);
    }
    this->store_units(m_.weights, 0, words);
  }
  __device__ __forceinline__ void multiply_slopes() {
#pragma unroll
    for (int i = 0; i < kScores / 2; i += 2) {
      std::uint32_t slopes[2];
      this->take_slopes(i / 2, slopes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& ds = ds_[0][2 * i + j];
        ds = core::score_gradient(p.score, ds, slope_of(slopes, j)).product;
      }
    }
  }

  /// dP^T becomes dS^T, of queries from `first` on. Where a mask makes a weight 0 the other factor
  /// may be anything.
  __device__ __forceinline__ void differentiate(int i, Rows rows, int first, bool masked) {
    const std::uint32_t deltas = m_.deltas + i % K.stages * core::mma_statistic_bytes(K) +
                                 first * 4 + Scores::first_score_query() * 4;
#pragma unroll
    for (int c = 0; c < kQueries / 8; ++c) {
      float delta[2];
      ptx::load_shared(deltas + c * 32, delta[0], delta[1]);
#pragma unroll
      for (int g = 0; g < kScoreGroups; ++g) {
        float w[4];
        if constexpr (kBoth) {
#pragma unroll
          for (int j = 0; j < 4; ++j) w[j] = s_[g][4 * c + j];
        } else {
          this->take_weights(g, c, w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = ds_[g][4 * c + j];
          x = w[j] * (x - delta[j % 2]);
          if (masked && w[j] == 0.0F) x = 0.0F;
        }
      }
    }
    if constexpr (kExtras) {
      store_bias_gradient(p, place_of(rows), ds_[0]);
      __syncwarp();
      if (p.score.capped) multiply_slopes();
    }
#pragma unroll
    for (int g = 0; g < kScoreGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        operand_[g][i] = ptx::pack<kType>(ds_[g][2 * i], ds_[g][2 * i + 1]);
      }
    }
  }

  // ---- results ----

  __device__ __forceinline__ std::uint16_t* result_row(void* tensor, const core::Strides& strides,
                                                       int key, int lane) const {
    return static_cast<std::uint16_t*>(tensor) +
           tile_.sequence.key_offset(strides, key, tile_.head) + store_column(lane);
  }
  /// first: the warp's first column.
  template <int kCount>
  __device__ __forceinline__ static void write_row(const float (&x)[kCount], int half, float scale,
                                                   bool exists, int lane, int first, int dim,
                                                   std::uint16_t* row) {
    if constexpr (kParts == 1) {
      store_row<kType, K.any_layout>(x, half, scale, exists, lane, dim, row);
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 8; ++i) {
        const float eight[8] = {x[8 * i],     x[8 * i + 1], x[8 * i + 2], x[8 * i + 3],
                                x[8 * i + 4], x[8 * i + 5], x[8 * i + 6], x[8 * i + 7]};
        const int column = first + i * kParts * 16;
        store_row<kType, K.any_layout>(eight, half, scale, exists, lane, dim - column,
                                       row + column);
      }
    }
  }
  __device__ __forceinline__ void write() const {
    const int first_key = this->first_key(), lane = this->lane();
    const int first = kParts > 1 ? part() * 16 : 0;
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i) {
      const int g = i / 2, half = i % 2, key = first_key + i * 8;
      const bool exists = key < tile_.band.seqlen_k;
      if constexpr (kValues) {
        write_row(dv_[g], half, 1.0F, exists, lane, first, p.head_dim_v,
                  result_row(p.dv, p.dv_strides, key, lane));
      }
      if constexpr (kKeys) {
        write_row(dk_[g], half, p.score.scale, exists, lane, first, p.head_dim,
                  result_row(p.dk, p.dk_strides, key, lane));
      }
    }
  }

  // Of a role only what is its own.
  float s_[kScoreGroups][kScores], ds_[kScoreGroups][kScores];
  std::uint32_t operand_[kScoreGroups][kScores / 2];  ///< dS^T
  std::uint32_t held_[Tile::kHeldWords];
  float dv_[kGroups][kDv / kParts / 2], dk_[kGroups][kD / kParts / 2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void backward(const BackwardParams& p, char* shared) {
  const std::uint32_t start = ptx::shared_address(shared);
  const std::uint32_t base =
      (start + core::kChunkBytes - 1) / core::kChunkBytes * core::kChunkBytes;
  const BackwardMemory<K> memory(base);
  static_assert(sizeof(KeyTile) <= core::kKeyTileBytes);
  auto& tile = *reinterpret_cast<KeyTile*>(
      shared + (memory.deltas + K.stages * core::mma_statistic_bytes(K) - start));
  if constexpr (!core::splits_roles(K)) {
    Backward<K, Role::both>(p, memory, tile).run();
  } else {
    const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < core::mma_key_warps(K)) {
      Backward<K, Role::values>(p, memory, tile).run();
    } else {
      Backward<K, Role::keys>(p, memory, tile).run();
    }
  }
}

}  // namespace tessera::cuda::mma
