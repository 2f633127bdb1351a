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
#pragma once

#include "cuda/mma/backward_tile.h"
#include "cuda/tile/backward_extras.h"

namespace tessera::cuda::mma {

template <core::Kernel K, Role kRole>
class Backward : BackwardTile<K, kRole> {
  using Tile = BackwardTile<K, kRole>;
  using Tile::kValues, Tile::kKeys, Tile::kBoth, Tile::kM, Tile::kN, Tile::kOwn, Tile::kD,
      Tile::kDv, Tile::kGroups, Tile::kThreads, Tile::kRoleThreads, Tile::kHeld;
  using Tile::meet, Tile::meet_own, Tile::lane, Tile::key_warp, Tile::turn, Tile::take_turn,
      Tile::pass_turn, Tile::after, Tile::queries_of, Tile::gradients_of, Tile::load_queries,
      Tile::load_gradients;
  using Tile::p, Tile::m_, Tile::tile_;
  using typename Tile::Rows;
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr bool kExtras = K.extra == core::Extra::all;
  /// Queries whose scores are made at a time: where a warp has both roles there are registers for
  /// no more.
  static constexpr int kPart = kBoth ? 32 : kM;
  static constexpr int kScores = kPart / 2;  ///< of a thread and group
  // dQ is shared out among all warps: half of the rows, and of pieces of 16 columns every
  // kColumnWarps-th, each.
  static constexpr int kQueryGroups = kM / 32;  ///< of 16 rows
  static constexpr int kColumnWarps = kThreads / 32 / 2, kPieces = kD / 16 / kColumnWarps;
  /// Pieces of 16 columns that are made at a time: as many as there are registers for.
  static constexpr int kAtOnce = kPieces > 3 ? 2 : kPieces;
  // Buffers of what this role fetches, and of what the other does.
  static constexpr int kBuffers = kValues ? K.stages : K.q_stages;
  static constexpr int kOthers = kValues ? K.q_stages : K.stages;
  // Named barriers, beside those of Tile: of what one role tells the other.
  static constexpr int kWeightsReady = 4, kScoresReady = 5, kFetched = 6;

  static_assert(kPieces * kColumnWarps * 16 == kD && kPieces % kAtOnce == 0 && kColumnWarps <= 4);
  static_assert(kBoth != core::splits_roles(K) && (!kExtras || (!kBoth && kGroups == 1)));
  static_assert(!kBoth || (K.q_stages == 2 && K.stages == 1));

 public:
  __device__ __forceinline__ Backward(const BackwardParams& params, const BackwardMemory<K>& memory,
                                      KeyTile& tile)
      : Tile(params, memory, tile) {}

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
      if constexpr (kKeys && kHeld > 0) this->hold_values(held_);
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
      for (int first = 0; first < kM; first += kPart) {
        multiply<kD, 0>(s_, m_.k, queries_of(i) + first * 128);
        weigh(i, rows, first, masked);
        multiply<kDv, kHeld>(ds_, m_.v, gradients_of(i) + first * 128);
        differentiate(i, rows, first, masked);
        store_scores(first);
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
        multiply<kD, 0>(s_, m_.k, queries_of(i));
        weigh(i, rows, 0, is_masked(rows.m));
        give_weights();
        ptx::copy_wait<0>();
        ptx::barrier_arrive(kWeightsReady, kThreads);
        if constexpr (kBuffers < kOthers) meet_own();  // dO that the others have fetched is there
        if constexpr (kExtras) drop(p, place_of(rows), s_[0]);
        add_values(gradients_of(i));
        take_turn(rows);
        ptx::barrier_sync(kScoresReady, kThreads);
      } else {
        multiply<kDv, kHeld>(ds_, m_.v, gradients_of(i));
        if constexpr (kExtras) drop(p, place_of(rows), ds_[0]);
        ptx::barrier_sync(kWeightsReady, kThreads);
        differentiate(i, rows, 0, is_masked(rows.m));
        store_scores(0);
        ptx::copy_wait<0>();
        ptx::barrier_arrive(kScoresReady, kThreads);
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

  /// D = A B^T of the warp's keys and a block of rows. The first kFromRegisters columns of A are
  /// held_.
  template <int kDim, int kFromRegisters, int kCount>
  __device__ __forceinline__ void multiply(float (&d)[kGroups][kCount], std::uint32_t keys,
                                           std::uint32_t rows) const {
    clear(d);
    keys += key_warp() * kOwn * 128 + along();
    rows += across();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
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
        ptx::load_matrices(b, (rows ^ i % 4 * 32) + (i / 4 * kM + j * 16) * 128);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          ptx::mma<kType>(d[g] + j * 8, a[g], b[0], b[1]);
          ptx::mma<kType>(d[g] + j * 8 + 4, a[g], b[2], b[3]);
        }
      }
    }
  }

  /// D += A B of the warp's keys, the operand that operand_of(g, j, a) gives, and rows.
  template <int kDim, class OperandOf>
  __device__ __forceinline__ void add_across(float (&d)[kGroups][kDim / 2], std::uint32_t rows,
                                             const OperandOf& operand_of) {
    rows += along();
#pragma unroll
    for (int j = 0; j < kPart / 16; ++j) {
      std::uint32_t a[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) operand_of(g, j, a[g]);
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        std::uint32_t b[4];
        ptx::load_matrices_across(b, (rows ^ i % 4 * 32) + (i / 4 * kM + j * 16) * 128);
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
    add_across<kDv>(dv_, dout, [&](int g, int j, std::uint32_t(&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = ptx::pack<kType>(s_[g][j * 8 + 2 * i], s_[g][j * 8 + 2 * i + 1]);
      }
    });
  }
  /// dK += dS^T Q.
  __device__ __forceinline__ void add_keys(std::uint32_t q) {
    add_across<kD>(dk_, q, [&](int g, int j, std::uint32_t(&a)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = operand_[g][j * 4 + i];
    });
  }

  /// dQ += dS K: the warp's pieces of it, to memory.
  __device__ __forceinline__ void add_queries(Rows rows) {
    const int warp = static_cast<int>(ptx::opaque(threadIdx.x)) / 32;
    const int half = warp / kColumnWarps, first = warp % kColumnWarps;  // rows; pieces
    float* to = p.rows.dq_of(tile_.first_block + rows.m, rows.head) +
                (first * 8 * kM / 16 + half * kQueryGroups) * 32 + lane();
    const bool stores = p.in_order && turn().rank == 0;  // what is there has not been made 0
    const std::uint32_t scores = scores_from(half);
    const std::uint32_t keys = m_.k + (along() ^ first * 32);
#pragma unroll
    for (int c = 0; c < kPieces; c += kAtOnce) {
      float dq[kAtOnce][kQueryGroups][8] = {};
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        std::uint32_t a[kQueryGroups][4];
#pragma unroll
        for (int g = 0; g < kQueryGroups; ++g) {
          ptx::load_matrices_across(a[g], (scores ^ g * 32) + j * 16 * kM * 2);
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

  __device__ __forceinline__ ScorePlace place_of(Rows rows) const {
    return {tile_.sequence.batch, rows.head,           rows.m * kM + lane() % 4 * 2,
            this->first_key(),    tile_.band.seqlen_q, tile_.band.seqlen_k};
  }
  __device__ __forceinline__ bool is_masked(int m) const {
    return agreed(m >= tile_.queries.full.end || m < tile_.queries.full.begin);
  }

  /// S^T becomes P^T, of queries from `first` on.
  __device__ __forceinline__ void weigh(int i, Rows rows, int first, bool masked) {
    if constexpr (kExtras) {
      transform_scores(p, place_of(rows), s_[0],
                       [this](const auto& slopes) { give_slopes(slopes); });
    }
    const float factor = kExtras ? 1.0F : p.score.pre;
    const std::uint32_t shifts =
        m_.shifts + i % K.q_stages * core::mma_statistic_bytes(K) + first * 4 + lane() % 4 * 8;
#pragma unroll
    for (int c = 0; c < kPart / 8; ++c) {
      float shift[2];
      ptx::load_shared(shifts + c * 32, shift[0], shift[1]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = s_[g][4 * c + j];
          x = ptx::ex2(fmaf(x, factor, -shift[j % 2]));
        }
      }
    }
    if (masked) mask(rows.m * kM + first + lane() % 4 * 2);
  }
  /// first: the thread's first query.
  __device__ __forceinline__ void mask(int first) {
    const int first_key = this->first_key();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + g * 16 + 8 * half;
        core::Range rows = tile_.band.queries_of({key, key + 1});
        if (key >= tile_.band.seqlen_k) rows = {0, 0};
        mask_row(s_[g], half, {rows.begin - first, rows.end - first}, 0.0F);
      }
    }
  }

  /// P^T to the partner; the scores' derivatives lie behind it, as it does.
  __device__ __forceinline__ void give_weights() const {
    const std::uint32_t to = m_.exchange + threadIdx.x % kRoleThreads * 16;
#pragma unroll
    for (int i = 0; i < kGroups * kM / 8; ++i) {
      const float* const x = s_[i / (kM / 8)] + i % (kM / 8) * 4;
      ptx::store_shared(to + i * kRoleThreads * 16, x[0], x[1], x[2], x[3]);
    }
  }
  __device__ __forceinline__ std::uint32_t slopes_place() const {
    return m_.exchange + kN * kM * 4 + threadIdx.x % kRoleThreads * 16;
  }
  __device__ __forceinline__ void give_slopes(const std::uint32_t (&slopes)[kScores / 2]) const {
#pragma unroll
    for (int i = 0; i < kScores / 2; i += 4) {
      ptx::store_shared(slopes_place() + i / 4 * kRoleThreads * 16,
                        {slopes[i], slopes[i + 1], slopes[i + 2], slopes[i + 3]});
    }
  }
  __device__ __forceinline__ void multiply_slopes() {
#pragma unroll
    for (int i = 0; i < kScores / 2; i += 2) {
      float words[2];
      ptx::load_shared(slopes_place() + i / 4 * kRoleThreads * 16 + i % 4 * 4, words[0], words[1]);
      const std::uint32_t slopes[2] = {__float_as_uint(words[0]), __float_as_uint(words[1])};
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
    const std::uint32_t deltas =
        m_.deltas + i % K.stages * core::mma_statistic_bytes(K) + first * 4 + lane() % 4 * 8;
    const std::uint32_t weights = m_.exchange + threadIdx.x % kRoleThreads * 16;
#pragma unroll
    for (int c = 0; c < kPart / 8; ++c) {
      float delta[2];
      ptx::load_shared(deltas + c * 32, delta[0], delta[1]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float w[4];
        if constexpr (kBoth) {
#pragma unroll
          for (int j = 0; j < 4; ++j) w[j] = s_[g][4 * c + j];
        } else {
          ptx::load_shared(weights + (g * (kM / 8) + c) * kRoleThreads * 16, w[0], w[1], w[2],
                           w[3]);
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
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        operand_[g][i] = ptx::pack<kType>(ds_[g][2 * i], ds_[g][2 * i + 1]);
      }
    }
  }

  // dS^T in shared memory: a row a key, 16-byte units of eight queries, at their number XOR that of
  // the line of 128 bytes. Of 32 queries a line has two keys.

  static constexpr int kLineKeys = 64 / kM;

  __device__ __forceinline__ std::uint32_t score_place(int key, int unit) const {
    const int line = key / kLineKeys;
    return m_.scores + line * 128 + ((key % kLineKeys * 4 + unit) ^ line % 8) * 16;
  }
  __device__ __forceinline__ void store_scores(int first) const {
    const int lane = this->lane();
    const std::uint32_t to = score_place(key_warp() * kOwn + lane / 4, first / 8) + lane % 4 * 4;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        // Eight keys further the line's number is, modulo 8, the same, or 4 more.
        const int swizzled = i / 2 * 16 ^ (kLineKeys > 1 ? i % 2 * 64 : 0);
        ptx::store_shared((to ^ swizzled) + (g * 16 + i % 2 * 8) * kM * 2, operand_[g][i]);
      }
    }
  }
  /// Where the lane's row of the first operand with half of the queries lies, for ldmatrix.
  __device__ __forceinline__ std::uint32_t scores_from(int half) const {
    const int lane = this->lane();
    return score_place(lane / 16 * 8 + lane % 8, half * (kM / 16) + lane / 8 % 2);
  }

  // ---- results ----

  __device__ __forceinline__ std::uint16_t* result_row(void* tensor, const core::Strides& strides,
                                                       int key, int lane) const {
    return static_cast<std::uint16_t*>(tensor) +
           tile_.sequence.key_offset(strides, key, tile_.head) + store_column(lane);
  }
  __device__ __forceinline__ void write() const {
    const int first_key = this->first_key(), lane = this->lane();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + g * 16 + 8 * half;
        const bool exists = key < tile_.band.seqlen_k;
        if constexpr (kValues) {
          store_row<kType, K.any_layout>(dv_[g], half, 1.0F, exists, lane, p.head_dim_v,
                                         result_row(p.dv, p.dv_strides, key, lane));
        }
        if constexpr (kKeys) {
          store_row<kType, K.any_layout>(dk_[g], half, p.score.scale, exists, lane, p.head_dim,
                                         result_row(p.dk, p.dk_strides, key, lane));
        }
      }
    }
  }

  // Of a role only what is its own.
  float s_[kGroups][kScores], ds_[kGroups][kScores];
  std::uint32_t operand_[kGroups][kScores / 2];  ///< dS^T
  std::uint32_t held_[Tile::kHeldWords];
  float dv_[kGroups][kDv / 2], dk_[kGroups][kD / 2];
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
