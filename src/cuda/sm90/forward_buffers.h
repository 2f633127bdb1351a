// Shared memory of a block of the Hopper forward kernel: what the producer (forward_producer.h)
// hands to the consumers (forward_consumer.h).
#pragma once

#include "core/storage.h"
#include "core/work.h"
#include "cuda/sm90/load.h"
#include "cuda/sm90/pair.h"
#include "cuda/sm90/ring.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

/// A row of the catalog as the kernel needs it.
template <core::Kernel K>
struct ForwardShape {
  static constexpr int kGroups = consumers(K);
  static constexpr int kThreads = threads(K);
  static constexpr Dtype kScoreType = core::score_dtype_of(K.operand);  ///< of queries and keys
  static constexpr Dtype kType = core::dtype_of(K.operand);             ///< of weights and values
  static constexpr bool kScaled = has_scales(K);  ///< queries and keys have scales
  /// Values come in tiles (core/value_tiles.h), and sums are promoted.
  static constexpr bool kEightBit = is_eight_bit(K);
  static constexpr int kChunkColumns = core::swizzled_columns(kScoreType);
  static constexpr int kStepColumns = core::multiplied_columns(kScoreType);  ///< of one wgmma
  static constexpr int kDim = own_dim(K), kDimV = own_dim_v(K);
  static constexpr int kChunks = core::ceil_div(kDim, kChunkColumns);
  static constexpr int kChunkColumnsV = core::swizzled_columns(kType);
  static constexpr int kChunksV = core::ceil_div(kDimV, kChunkColumnsV);
  static constexpr int kShares = K.block_m / K.q_rows;  ///< items of queries of a tile
  static constexpr bool kSparesQueries = kShares == 1 && K.q_stages > 1;  ///< a tile of them
  static constexpr bool kHoldsQueries = holds_queries(K);
  static constexpr int kQBytes = along_bytes(K, K.q_rows);
  static constexpr int kKBytes = along_bytes(K, K.block_n);
  static constexpr int kVBytes = value_bytes(K);
  static constexpr int kPanels = K.block_n / core::ValueTiles::kPanelKeys;  ///< of values, in tiles
  static constexpr bool kProducesMore = K.any_layout || K.cluster > 1;
  static constexpr int kProducerRegisters = kProducesMore ? 40 : kGroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kProducesMore ? 232 : kGroups == 2 ? 240 : 160;
  /// Threads that fill a buffer: one asks the copy engine, or a warpgroup loads element by element.
  static constexpr int kProducers = K.any_layout ? kCopyingThreads : 1;

  static_assert(kShares == 1 || (kShares == kGroups && K.q_rows == kRows));
  static_assert(K.block_m % kRows == 0 && (kGroups == 2 || (kGroups == 3 && !K.any_layout)));
  static_assert(kEightBit || kChunkColumnsV == kColumns);
  static_assert(K.block_n % core::multiplied_columns(kType) == 0 && kDim % kStepColumns == 0 &&
                kDimV % 32 == 0);
  static_assert(K.cluster == 1 || (!kScaled && K.block_n % 8 == 0));
  static_assert(shared_bytes(K) <= kMaxSharedBytes);
};

/// A tile of query rows, as the producer describes it to the consumers.
struct alignas(16) Tile {
  int first_row = -1;       ///< of its sequence; -1: there are no more tiles
  int head = 0, batch = 0;  ///< head: of the work's, 2^rows.shift query heads each
  int blocks_end = 0;       ///< of the blocks of keys that its rows see
  core::Band band;
  int first_q = 0;               ///< of the sequence: core::Sequence
  std::int64_t o = 0;            ///< elements from p.o to the first query's of its first head
  std::int64_t softmax_lse = 0;  ///< the same of p.softmax_lse
};

/// A tile and the blocks of keys that each warpgroup walks over: none if its rows see no key.
template <core::Kernel K>
struct Order {
  Tile tile;
  struct alignas(16) Walk {
    core::KeyBlocks blocks;
  } walks[consumers(K)];

  static_assert(sizeof(Tile) + consumers(K) * sizeof(Walk) <= kOrderBytes);
};

/// What is to be loaded for a tile, as the warp that schedules tells the one that loads.
struct alignas(16) TileLoads {
  core::Range blocks;            ///< of keys; it begins below 0: there are no more tiles
  LoadRows queries;              ///< from the tile's first one on
  LoadRows keys;                 ///< of block 0
  const char* panels = nullptr;  ///< of values in tiles (core/value_tiles.h): the sequence's first
  int panel_count = 0;
};
static_assert(sizeof(TileLoads) <= kTileLoadsBytes);

/// Scales of a tile whose tensors have 8 bits (S14), looked up beforehand: consumers would wait
/// for memory between two tiles.
struct alignas(16) TileScales {
  const float* k = nullptr;  ///< of the keys, all blocks'
  float q = 1.0F;            ///< of its queries, where they share one
  float first_k = 1.0F;      ///< of the keys, where they share one
  float v = 1.0F;            ///< of its values, where they share one
  // Of the last tile before that has keys: its results need no registers until they are written.
  float last_v = 1.0F;
  int last_head = 0, last_batch = 0, last_first_q = 0;
  std::int64_t last_o = 0, last_softmax_lse = 0;
};
static_assert(sizeof(TileScales) <= kTileScalesBytes);

template <core::Kernel K>
struct ForwardBuffers : BlockOf<K> {
  Ring<K.q_stages> q;  ///< item: a tile's queries, or a warpgroup's share of them
  Ring<kStages> k, v;
  std::uint32_t promoted;   ///< sums of O (promoted_sums.h): promoted_bytes
  std::uint32_t sums;       ///< of scores: sums_bytes
  std::uint32_t sums_full;  ///< mbarriers of a warp's, all full ones before the empty ones
  std::uint32_t scheduled;  ///< mbarriers of loads
  char* orders;             ///< one beside each buffer of q; behind them the loads

  __device__ __forceinline__ explicit ForwardBuffers(char* shared) {
    using S = ForwardShape<K>;
    const std::uint32_t start = ptx::shared_address(shared);
    const std::uint32_t base = (start + 1023) / 1024 * 1024;
    q.data = base;
    k.data = q.data + K.q_stages * S::kQBytes;
    v.data = k.data + kStages * S::kKBytes;
    q.bytes = S::kQBytes;
    k.bytes = S::kKBytes;
    v.bytes = S::kVBytes;
    promoted = v.data + values_bytes(K);
    sums = promoted + promoted_bytes(K);
    q.full = sums + sums_bytes(K);
    q.empty = q.full + 8 * K.q_stages;
    k.full = q.empty + 8 * K.q_stages;
    k.empty = k.full + 8 * kStages;
    v.full = k.empty + 8 * kStages;
    v.empty = v.full + 8 * kStages;
    sums_full = v.empty + 8 * kStages;
    scheduled = sums_full + 8 * sum_barriers(K);
    orders = shared + (q.full + 8 * barriers(K) - start);
  }

  /// producers: arrivals that make a buffer of keys or values full.
  __device__ __forceinline__ void initialise(std::uint32_t producers) const {
    // Queries are there when they have come, and when their tile has been described.
    q.initialise(ForwardShape<K>::kProducers + (schedules_apart(K) ? 1 : 0),
                 ForwardShape<K>::kGroups / ForwardShape<K>::kShares);
    k.initialise(producers, ForwardShape<K>::kGroups);
    v.initialise(producers, ForwardShape<K>::kGroups);
    for (int i = 0; i < sum_barriers(K); ++i) ptx::mbarrier_init(sums_full + 8 * i, 1);
    for (int i = 0; schedules_apart(K) && i < kTilesAhead; ++i)
      ptx::mbarrier_init(scheduled + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ Order<K>& order(std::uint32_t q_item) const {
    return *reinterpret_cast<Order<K>*>(orders + q_item % K.q_stages * order_bytes(K));
  }
  /// Its scales, of rows that have them.
  __device__ __forceinline__ TileScales& scales(std::uint32_t q_item) const {
    return *reinterpret_cast<TileScales*>(reinterpret_cast<char*>(&order(q_item)) + kOrderBytes);
  }

  // ---- between the warps that schedule and load; n counts tiles ----

  __device__ __forceinline__ TileLoads& loads(std::uint32_t n) const {
    return *reinterpret_cast<TileLoads*>(orders + K.q_stages * order_bytes(K) +
                                         n % kTilesAhead * kTileLoadsBytes);
  }
  __device__ __forceinline__ void tell_loads(std::uint32_t n) const {
    ptx::mbarrier_arrive(scheduled + n % kTilesAhead * 8);
  }
  __device__ __forceinline__ void await_loads(std::uint32_t n) const {
    ptx::mbarrier_wait(scheduled + n % kTilesAhead * 8, n / kTilesAhead & 1);
  }
};

}  // namespace tessera::cuda::sm90
