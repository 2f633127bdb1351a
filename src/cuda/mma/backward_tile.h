// A block of keys of the backward by mma.sync, as a warp with a role sees it (backward.h): where
// its threads stand, the rows that it walks over, copies, and whose turn it is to add dQ.
#pragma once

#include "core/mma_shape.h"
#include "core/storage.h"
#include "cuda/mma/backward_params.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/copy_rows.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::mma {

enum class Role : std::uint8_t { both, values, keys };

/// A block of keys, in shared memory: what few steps ask for would take registers from all.
struct KeyTile {
  core::Sequence sequence;
  core::Band band;
  core::QueryBlocks queries;     ///< blocks of rows that see its keys
  std::int64_t first_block = 0;  ///< core::RowBlocks::first_of its sequence
  int first_key = -1;            ///< -1: there are no more
  int head = 0;                  ///< key/value head
  /// Where dQ is added in order: the step's turn, and where it is counted. Of each role.
  struct Turn {
    std::int32_t* word;
    int rank;
  } turns[2];
};

/// Where what threads share lies.
template <core::Kernel K>
struct BackwardMemory {
  std::uint32_t k, v, q, dout, scores, exchange, weights, partials, shifts, deltas;

  __device__ __forceinline__ explicit BackwardMemory(std::uint32_t start)
      : k(start),
        v(k + core::mma_key_bytes(K)),
        q(v + core::mma_kept_value_bytes(K)),
        dout(q + K.q_stages * core::mma_query_bytes(K)),
        scores(dout + K.stages * core::mma_gradient_bytes(K)),
        exchange(scores + core::mma_score_bytes(K)),
        weights(exchange + core::mma_exchange_bytes(K)),
        partials(weights + core::mma_weight_bytes(K)),
        shifts(partials + core::mma_partial_bytes(K)),
        deltas(shifts + K.q_stages * core::mma_statistic_bytes(K)) {}
};

template <core::Kernel K, Role kRole>
class BackwardTile {
 protected:
  static constexpr bool kValues = kRole != Role::keys, kKeys = kRole != Role::values;
  static constexpr bool kBoth = kRole == Role::both;
  static constexpr int kM = K.block_m, kN = K.block_n, kOwn = K.tile_m;  ///< kOwn: a warp's keys
  static constexpr int kD = K.head_dim, kDv = K.head_dim_v;
  static constexpr int kParts = core::mma_parts(K);  ///< warps that share them, a team
  static constexpr int kGroups = kOwn / 16;          ///< of 16 keys of a warp
  static constexpr int kThreads = core::mma_threads(K);
  static constexpr int kRoleThreads = core::mma_key_warps(K) * 32;
  /// Columns of values that a warp has in registers; of parts those of its own, or of keys.
  static constexpr int kHeld = (kParts > 1 && kValues ? kD : core::mma_held_values(K)) / kParts;
  static constexpr int kHeldWords = kHeld > 0 ? kGroups* kHeld / 4 : 1;

  /// Named barriers: of all; of a role, and the other; of teams.
  static constexpr int kAll = 1, kRoles = 2, kTeams = 8;

  static_assert((kM == 64 || kM == 32 || (kM == 16 && kParts > 1)) && kN % kOwn == 0);
  static_assert(kOwn % 16 == 0 && kD % (kParts * 16) == 0 && kDv % (kParts * 16) == 0);
  static_assert(K.stages >= 1 && K.q_stages >= K.stages && K.q_stages <= 2);

  __device__ __forceinline__ BackwardTile(const BackwardParams& params,
                                          const BackwardMemory<K>& memory, KeyTile& tile)
      : p(params), m_(memory), tile_(tile) {}

  // ---- threads ----

  /// All threads; those of the role.
  /// @{
  __device__ __forceinline__ static void meet() { ptx::barrier_sync(kAll, kThreads); }
  __device__ __forceinline__ static void meet_own() {
    ptx::barrier_sync(kBoth ? kAll : kValues ? kRoles : kRoles + 1, kRoleThreads);
  }
  /// @}
  /// Those that share keys.
  __device__ __forceinline__ static void meet_team() {
    if constexpr (kN == kOwn) {
      meet_own();
    } else {
      ptx::barrier_sync(kTeams + (kValues ? 0 : kN / kOwn) + team(), kParts * 32);
    }
  }

  __device__ __forceinline__ static int lane() {
    return static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
  }
  __device__ __forceinline__ static int role_thread() {
    return static_cast<int>(ptx::opaque(threadIdx.x)) % kRoleThreads;
  }
  __device__ __forceinline__ static int team() {
    if constexpr (kParts == 1) return role_thread() / 32;
    return static_cast<int>(ptx::opaque(threadIdx.x) / (kParts * 32) % (kN / kOwn));
  }
  /// Which of a team: it has every kParts-th piece of 16 columns.
  __device__ __forceinline__ static int part() {
    return static_cast<int>(ptx::opaque(threadIdx.x) / 32 % kParts);
  }
  /// The thread's first key, in its sequence; others are 8 keys apart.
  __device__ __forceinline__ int first_key() const {
    return tile_.first_key + team() * kOwn + lane() / 4;
  }

  // ---- tiles and their rows ----

  /// The next block that nobody has taken: blocks of unequal length are handed out as
  /// multiprocessors get free. The first one, too: whoever waits for another's sums must not wait
  /// for one that has not begun.
  __device__ __forceinline__ void take_tile() const {
    for (;;) {
      tile_.first_key = -1;
      const int index = atomicAdd(p.next_tile, 1);
      if (index >= p.work.count<int>()) return;
      const core::Work work = p.work.at(index);
      const core::Sequence sequence = p.sequences.at(work.batch);
      // In order the last keys begin: see sm90/backward_producer.h.
      const int first_key = p.work.key_block(work, p.in_order) * kN;
      if (first_key >= sequence.seqlen_k) continue;
      tile_.sequence = sequence;
      tile_.band = p.window.band_of(sequence);
      tile_.queries = core::query_blocks(tile_.band, {first_key, first_key + kN}, kM);
      tile_.first_block = core::RowBlocks{kM, p.rows.blocks.per_sequence}.first_of(sequence);
      tile_.first_key = first_key;
      tile_.head = work.head;
      return;
    }
  }

  /// The m-th block of a query head's.
  struct Rows {
    int head, m;
  };
  /// The next that sees the keys; none: head < 0.
  __device__ __forceinline__ Rows after(Rows rows) const {
    if (rows.head < 0 || ++rows.m < tile_.queries.seen.end) return rows;
    const bool last = rows.head + 1 == (tile_.head + 1) * p.group;
    return {last ? -1 : rows.head + 1, tile_.queries.seen.begin};
  }
  __device__ __forceinline__ std::uint32_t queries_of(int i) const {
    return m_.q + i % K.q_stages * core::mma_query_bytes(K);
  }
  __device__ __forceinline__ std::uint32_t gradients_of(int i) const {
    return m_.dout + i % K.stages * core::mma_gradient_bytes(K);
  }

  // ---- whose turn it is to add dQ of a block of rows, where that has an order ----

  // The last block of keys that the rows see comes first, and blocks are handed out so: nobody
  // waits for one that has not begun. Of a role the first thread waits, before its threads meet,
  // and says so after they have met again. Roles add to different rows: each has turns of its own.

  __device__ __forceinline__ KeyTile::Turn& turn() const { return tile_.turns[kValues ? 0 : 1]; }
  __device__ __forceinline__ static bool leads() { return threadIdx.x % kRoleThreads == 0; }

  __device__ __forceinline__ void take_turn(Rows rows) const {
    if (!p.in_order || !leads()) return;
    const core::Range all = {rows.m * kM, core::min((rows.m + 1) * kM, tile_.band.seqlen_q)};
    const int rank = core::key_blocks(tile_.band, all, kN).seen.end - 1 - tile_.first_key / kN;
    std::int32_t* const word =
        p.turns + p.rows.index_of(tile_.first_block + rows.m, rows.head) * 2 + (kValues ? 0 : 1);
    turn() = {word, rank};
    while (ptx::load_acquire(word) != rank) {
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if (!p.in_order) return;
    __threadfence();
    meet_own();
    if (leads()) ptx::store_release(turn().word, turn().rank + 1);
  }

  // ---- copies: chunks of 64 columns, rows of 128 bytes, units of 16 bytes at their number XOR the
  // row's, as in forward.h ----

  /// kCount rows of columns kFrom to kTo, of which `dim` exist; of rows `left`.
  template <int kCount, int kFrom, int kTo>
  __device__ __forceinline__ void load(std::uint32_t to, const std::uint16_t* x,
                                       std::int64_t stride, int left, int dim) const {
    constexpr int kChunks = core::ceil_div(kTo - kFrom, 64);
    if constexpr (K.any_layout) {
      copy_rows<kCount, kRoleThreads>(
          to, dim - kFrom, kChunks,
          [&](int row, const std::uint16_t*& from) {
            from = x + row * stride + kFrom;
            return row < left;
          },
          role_thread());
      return;
    }
    // Eight rows at least, what the swizzle repeats by: of one warp a thread has two units of a
    // row.
    constexpr int kUnits = core::min(8, kRoleThreads / 8), kRowsAtOnce = kRoleThreads / kUnits;
    static_assert(kCount % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
    const int thread = role_thread();
    const int row = thread / kUnits, unit = thread % kUnits;
    const std::uint32_t at = to + row * 128 + (unit ^ row % 8) * 16;
    const std::uint16_t* from = x + row * stride + kFrom + unit * 8;
    constexpr int kUnrolled = kUnits == 8 ? kCount / kRowsAtOnce : 1;  // there are no registers
#pragma unroll kUnrolled
    for (int i = 0; i < kCount / kRowsAtOnce; ++i) {
#pragma unroll
      for (int column = 0; column < kChunks * 64; column += kUnits * 8) {
        const bool inside = row + i * kRowsAtOnce < left && kFrom + column + unit * 8 < dim;
        ptx::copy_async((at ^ column % 64 * 2) + (column / 64 * kCount + i * kRowsAtOnce) * 128,
                        from + column, inside);
      }
      from += kRowsAtOnce * stride;
    }
  }
  __device__ __forceinline__ void load_keys() const {
    const int left = tile_.sequence.seqlen_k - tile_.first_key;
    if constexpr (kValues)
      load<kN, 0, kD>(m_.k, key_row(p.k), p.k.strides.seqlen, left, p.head_dim);
    if constexpr (kKeys && core::mma_kept_value_bytes(K) > 0) {
      load<kN, kHeld, kDv>(m_.v, key_row(p.v), p.v.strides.seqlen, left, p.head_dim_v);
    }
  }
  __device__ __forceinline__ const std::uint16_t* key_row(const Source& source) const {
    return static_cast<const std::uint16_t*>(source.data) +
           tile_.sequence.key_offset(source.strides, tile_.first_key, tile_.head);
  }
  __device__ __forceinline__ const std::uint16_t* query_row(const Source& source, Rows rows) const {
    return static_cast<const std::uint16_t*>(source.data) +
           tile_.sequence.query_offset(source.strides, rows.m * kM, rows.head);
  }
  // Of no rows nothing.
  __device__ __forceinline__ void load_queries(int i, Rows rows) const {
    if (rows.head < 0) return;
    load<kM, 0, kD>(queries_of(i), query_row(p.q, rows), p.q.strides.seqlen,
                    tile_.sequence.seqlen_q - rows.m * kM, p.head_dim);
    load_statistics(m_.shifts + i % K.q_stages * core::mma_statistic_bytes(K),
                    p.rows.statistics_of(tile_.first_block + rows.m, rows.head));
  }
  __device__ __forceinline__ void load_gradients(int i, Rows rows) const {
    if (rows.head < 0) return;
    load<kM, 0, kDv>(gradients_of(i), query_row(p.dout, rows), p.dout.strides.seqlen,
                     tile_.sequence.seqlen_q - rows.m * kM, p.head_dim_v);
    load_statistics(m_.deltas + i % K.stages * core::mma_statistic_bytes(K),
                    p.rows.statistics_of(tile_.first_block + rows.m, rows.head) + kM);
  }
  __device__ __forceinline__ static void load_statistics(std::uint32_t to, const float* from) {
    const int i = role_thread();
    if (i < kM / 4) ptx::copy_async(to + i * 16, from + i * 4, true);
  }

  /// The kHeld columns of the warp's keys or values become operands.
  __device__ __forceinline__ void hold(const Source& source, int dim,
                                       std::uint32_t (&held)[kHeldWords]) const {
    const int own = first_key() - tile_.first_key, first = part() * 16 + lane() % 4 * 2;
    const int left = tile_.sequence.seqlen_k - tile_.first_key - own;
    const int columns = dim - first;
    const std::uint16_t* const x = key_row(source) + own * source.strides.seqlen + first;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kHeld / 4; ++i) {
        const int row = g * 16 + i % 2 * 8, column = i / 4 * kParts * 16 + i / 2 % 2 * 8;
        const std::uint16_t* const from = x + row * source.strides.seqlen + column;
        std::uint32_t& word = held[g * kHeld / 4 + i];
        if constexpr (K.any_layout) {
          word = ptx::load_if(row < left && column < columns, from) |
                 std::uint32_t{ptx::load_if(row < left && column + 1 < columns, from + 1)} << 16;
        } else {
          word = ptx::load_if(row < left && column < columns,
                              reinterpret_cast<const std::uint32_t*>(from));
        }
      }
    }
  }

  const BackwardParams& p;
  const BackwardMemory<K>& m_;
  KeyTile& tile_;
};

}  // namespace tessera::cuda::mma
