// Shared memory of a block of the Hopper backward kernel: what the producer (backward_producer.h)
// hands to the consumers (backward.h, backward_wide.h), and what these hand to each other.
#pragma once

#include "core/storage.h"
#include "core/work.h"
#include "cuda/sm90/pair.h"
#include "cuda/sm90/ring.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

/// A row of the catalog as the kernel needs it.
template <core::Kernel K>
struct BackwardShape {
  static constexpr int kGroups = consumers(K);
  static constexpr int kThreads = threads(K);
  static constexpr int kDim = own_dim(K), kDimV = own_dim_v(K);
  static constexpr int kChunks = core::ceil_div(kDim, kColumns);
  static constexpr int kChunksV = core::ceil_div(kDimV, kColumns);
  static constexpr int kKeys = own_keys(K);
  static constexpr int kScoreBytes = score_bytes(K);
  static constexpr int kOtherBytes = exchanges(K) ? buffer_bytes(kDim / 2, kKeys) : 0;
  static constexpr int kStatisticBytes = K.block_m * 4;
  static constexpr bool kProducesMore = K.any_layout;
  static constexpr int kProducerRegisters = kProducesMore ? 40 : 24;
  static constexpr int kConsumerRegisters = kProducesMore ? 232 : 240;
  static constexpr int kProducers = K.any_layout ? kCopyingThreads : 1;
  static constexpr Dtype kType = core::dtype_of(K.operand);

  static_assert(kGroups == 2 && kKeys == (splits_roles(K) ? 1 : 2) * kRows);
  // What a block is launched with is all there is to hand about.
  static_assert(kProducerRegisters + kGroups * kConsumerRegisters <= 168 * 3);
  static_assert(splits_roles(K) || (K.cluster == 1 && K.head_dim == K.head_dim_v &&
                                    K.head_dim * K.block_m == 2 * 64 * 64));
  static_assert(K.q_rows == K.block_m && core::swizzled_columns(kType) == kColumns);
  static_assert(shared_bytes(K) <= kMaxSharedBytes);
};

/// A block of keys, as the producer describes it to the consumers.
struct alignas(16) KeyTile {
  int first_key = -1;         ///< of its sequence; -1: there are no more tiles
  int head = 0, batch = 0;    ///< key/value head
  int entry = 0;              ///< core::Sequence::entry
  core::QueryBlocks queries;  ///< blocks of rows that see its keys, by place in the walk
  core::Band band;
  std::uint32_t item = 0;        ///< in the rings of K and V
  std::int64_t first_block = 0;  ///< core::RowBlocks::first_of its sequence
  std::int64_t first_row = 0;    ///< of its sequence in dk and dv; packed only
  /// Shared addresses of K and V. Consumers read them anew for every block of rows: what they know
  /// not to change, the compiler would keep ready in dozens of descriptors, and spill.
  std::uint32_t k = 0, v = 0;
  int steps = 0;  ///< blocks of rows, of all query heads
  core::RowSteps::Step first_step, last_step;
  int split = 0;  ///< core::Work::split
  core::RowWalk walk;

  /// Where a query head's steps end, but for the last of all.
  __device__ __forceinline__ int end_of(int member) const {
    return member == last_step.member ? last_step.block : queries.seen.end;
  }
};

/// A piece of dQ that is to be added to memory.
struct PieceOrder {
  std::int64_t index = -1;  ///< RowMemory::index_of; -1: no more come
  int rank = 0;             ///< where sums are ordered: how many key blocks add before
};

/// A block of rows whose dQ is complete.
struct FinishedRows {
  const float* sums = nullptr;
  std::uint16_t* to = nullptr;  ///< its first row in dQ
  int rows = 0;                 ///< that exist

  __device__ __forceinline__ void operator=(const FinishedRows& x) volatile {
    sums = x.sums;
    to = x.to;
    rows = x.rows;
  }
};

inline constexpr std::uint32_t kPieceOrders = 8;

/// Words that lie in shared memory.
struct BackwardWords {
  KeyTile tile;  ///< beside K's buffer
  /// By item % kPieceOrders: written by the producer, before the item's Q, and read by those who
  /// add up to two steps later, when the producer is at most four items further.
  PieceOrder pieces[kPieceOrders];
  FinishedRows finishing;    ///< PieceFinisher's
  int finished = 0;          ///< blocks of rows of this block's share that somebody has taken
  int taken[2] = {};         ///< the last one that a consumer has
  std::uint32_t handed = 0;  ///< the tile that the cluster's first block has taken
  core::RowWalk walk;        ///< the producer's: of the tile whose rows it loads
};
static_assert(sizeof(BackwardWords) <= kWordBytes);

template <core::Kernel K>
struct BackwardBuffers : BlockOf<K> {
  Ring<1> k, v;
  Ring<K.q_stages> q;         ///< with the shifts of its rows beside it
  Ring<dout_stages(K)> dout;  ///< with the deltas
  std::uint32_t shifts, deltas;
  Ring<2> scores;  ///< dS^T, a row a key, in chunks of 64 queries: from consumers to consumers
  /// The other block's dS^T, where they are exchanged. What is empty is its buffer, which this one
  /// fills: the consumers there say so.
  Ring<2> received;
  std::uint32_t other_keys;  ///< of the other block's keys, the columns of dQ that this one sums
  std::uint32_t weights;     ///< P^T in fp32, where the roles are split; then slopes
  std::uint32_t sums, sums_full;              ///< where they are not: see sums_of
  Ring<kQuarters> returned;                   ///< quarters of pieces of dQ on their way back
  std::uint32_t score_sums, score_sums_full;  ///< of S^T, then of dP^T (ScoreSums)
  std::uint32_t handed_full, handed_empty;    ///< mbarriers of words->handed
  BackwardWords* words;

  __device__ __forceinline__ explicit BackwardBuffers(char* shared) {
    using S = BackwardShape<K>;
    const std::uint32_t start = ptx::shared_address(shared);
    k.data = (start + 1023) / 1024 * 1024;
    k.bytes = buffer_bytes(S::kDim, S::kKeys);
    v.data = k.data + k.bytes;
    v.bytes = buffer_bytes(S::kDimV, S::kKeys);
    q.data = v.data + v.bytes;
    q.bytes = buffer_bytes(S::kDim, K.block_m);
    dout.data = q.data + K.q_stages * q.bytes;
    dout.bytes = buffer_bytes(S::kDimV, K.block_m);
    scores.data = dout.data + dout_stages(K) * dout.bytes;
    scores.bytes = S::kScoreBytes;
    received.data = scores.data + 2 * S::kScoreBytes;
    received.bytes = S::kScoreBytes;
    other_keys = received.data + (exchanges(K) ? 2 * S::kScoreBytes : 0);
    weights = other_keys + S::kOtherBytes;
    sums = weights;
    score_sums = weights + exchange_bytes(K) - 2 * sums_bytes(K);
    shifts = weights + exchange_bytes(K);
    deltas = shifts + K.q_stages * S::kStatisticBytes;
    k.full = deltas + dout_stages(K) * S::kStatisticBytes;
    k.empty = k.full + 8;
    v.full = k.empty + 8;
    v.empty = v.full + 8;
    q.full = v.empty + 8;
    q.empty = q.full + 8 * K.q_stages;
    dout.full = q.empty + 8 * K.q_stages;
    dout.empty = dout.full + 8 * dout_stages(K);
    scores.full = dout.empty + 8 * dout_stages(K);
    scores.empty = scores.full + 8 * 2;
    sums_full = scores.empty + 8 * 2;
    returned.data = sums + 2 * kSumBytes;
    returned.bytes = kQuarterBytes;
    returned.full = sums_full + 8 * 4;
    score_sums_full = sums_full + 8 * (splits_roles(K) ? 4 : 4 + kQuarters);
    handed_full = score_sums_full + 8 * 2 * sum_barriers(K);
    handed_empty = handed_full + 8;
    received.full = handed_empty + 8;
    received.empty = received.full + 8 * 2;
    words =
        reinterpret_cast<BackwardWords*>(shared + (score_sums_full + 8 * pair_barriers(K) - start));
  }

  __device__ __forceinline__ void initialise() const {
    using S = BackwardShape<K>;
    words->finished = 0;
    k.initialise(S::kProducers, S::kGroups);
    v.initialise(S::kProducers, S::kGroups);
    q.initialise(S::kProducers, S::kGroups);
    dout.initialise(S::kProducers, S::kGroups);
    scores.initialise(4 * S::kGroups, S::kGroups);  // by warps
    for (int group = 0; group < 2; ++group) sums_of(group).initialise(4, 1);
    for (int i = 0; i < pair_barriers(K); ++i) {
      const bool of_groups = exchanges(K) && i >= pair_barriers(K) - 2;  // received.empty
      ptx::mbarrier_init(score_sums_full + 8 * i, of_groups ? S::kGroups : 1);
    }
    if constexpr (!splits_roles(K)) {
      for (int i = 0; i < kQuarters; ++i) ptx::mbarrier_init(returned.full + 8 * i, 1);
    }
    ptx::fence_mbarrier_init();
  }

  /// A warpgroup's piece of dQ on its way to memory, filled by its four warps.
  __device__ __forceinline__ Ring<1> sums_of(int group) const {
    const std::uint32_t full = sums_full + 16 * group;
    return {sums + group * kSumBytes, kSumBytes, full, full + 8};
  }
  __device__ __forceinline__ std::uint32_t shifts_of(std::uint32_t i) const {
    return shifts + i % K.q_stages * BackwardShape<K>::kStatisticBytes;
  }
  __device__ __forceinline__ std::uint32_t deltas_of(std::uint32_t i) const {
    return deltas + i % dout_stages(K) * BackwardShape<K>::kStatisticBytes;
  }
};

}  // namespace tessera::cuda::sm90
