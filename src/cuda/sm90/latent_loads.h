// What the producing warps of the latent kernel (latent.h) ask memory for: blocks of 64 keys, each
// with its value, from wherever they lie, and the queries of a piece. Copies of 16 bytes take any
// page and stride; the producer walks by itself and is ahead in the next piece, too. Beside values
// of 8 bits that are in no chunks a row of the ring is value, scales, key: where it is so in
// memory, too, the copy engine brings it.
#pragma once

#include "cuda/mma/decode_walk.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/sm90/latent_shape.h"
#include "cuda/sm90/ring.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::sm90 {

/// What rows' weights are powers of two of, as it was last raised; -inf: of a row that has seen no
/// key. Where weights have makers of their own they find there what they subtract, 0 for -inf, and
/// whether there may be such a row.
template <core::Kernel K, bool kWidens = core::widens(K)>
struct LatentShifts {
  float of[K.block_m];

  __device__ __forceinline__ void set(int row, float shift) { of[row] = shift; }
};
template <core::Kernel K>
struct LatentShifts<K, true> {
  float of[K.block_m], applied[K.block_m];
  bool lacks;

  __device__ __forceinline__ void set(int row, float shift) {
    of[row] = shift;
    applied[row] = core::shift_of(shift);
    if (shift == -core::kInfinity) lacks = true;
  }
};

/// What the maker of a block's weights tells who multiplies values by them.
template <core::Kernel K, bool kWidens = core::widens(K)>
struct LatentTold {
  float factor[K.block_m];  ///< what has become of rows' weights, where their shifts were raised
  int raised;               ///< whether one was
};
template <core::Kernel K>
struct LatentTold<K, true> {
  /// Of a block's values by groups of columns, over the greatest of their key: pairs of fp16, those
  /// that a lane multiplies by side by side. Not told where weights are times scales.
  alignas(
      16) std::uint32_t shares[latent_weights(K) > 1 ? 1 : latent_groups(K)][4][K.block_n / 16][2];
  float factor[K.block_m];
  float of_outputs;  ///< what becomes of outputs besides: their power of two has changed
  bool changes;      ///< a shift was raised, or
  bool skipped;      ///< nobody sees the block
};

/// What a warp that makes nothing but weights remembers, as it has few registers.
struct LatentMemory {
  core::Range plain;         ///< tiles of the piece whose keys all rows see
  std::uint32_t pieces = 0;  ///< that had keys, before this one
  std::uint32_t ends = 0;    ///< of pieces
};

/// Where weights have makers of their own: what these share, and tell owners of outputs at the end
/// of a piece.
template <core::Kernel K, bool kWidens = core::widens(K)>
struct LatentRoles {};
template <core::Kernel K>
struct LatentRoles<K, true> {
  /// For products of rows' queries, which were multiplied by powers of two; of pairs with what all
  /// products are multiplied by.
  alignas(16) float query_factors[K.block_m];
  float top;  ///< a power of two: what weights times values' scales lack
  struct {
    float shift[K.block_m];
    float sums[4 * core::decode_scorers(K)][K.block_m];  ///< of weights, by warps
    float lacks;                                         ///< what outputs do
  } end;
  float rows[2 + core::PartTree::kOthers][K.block_m];  ///< see LatentResults
  LatentMemory scorers[4 * core::decode_scorers(K)];
};

/// Shared memory of a block of threads, from its first multiple of 1024 bytes.
template <core::Kernel K>
struct LatentShared {
  char queries[K.q_stages][latent_query_bytes(K)];
  char ring[latent_stages(K)][latent_key_bytes(K)];
  /// Of a block [keys][rows], 128 bytes a key. Between pieces, of 16 bits: what becomes of rows.
  char weights[latent_weight_stages(K)][latent_weight_bytes(K)];

  std::uint64_t barriers[2 * latent_buffers(K)];
  mma::DecodePiece<K> pieces[core::decode_warps(K)];
  /// What a consuming warp remembers where it has no registers.
  struct {
    core::Range plain;     ///< tiles of the piece whose keys all rows see
    std::uint32_t pieces;  ///< that had keys, before this one
  } warps[8];
  LatentShifts<K> shift;
  LatentTold<K> told[latent_weight_stages(K)];
  /// Where pages may be skipped: of the blocks in the ring, by warps that have fetched them, a bit
  /// a key that nobody sees.
  alignas(8) std::uint16_t skipped[latent_stages(K)][kLatentLoaders];
  bool exists;      ///< whether there is a first piece
  int span_length;  ///< of core::Spans
  mma::DecodeSearch<K> search;
  LatentRoles<K> roles;
};

/// The rings, as both sides count them.
template <core::Kernel K>
struct LatentRings {
  static constexpr int kStages = latent_stages(K), kWeightStages = latent_weight_stages(K);
  static constexpr int kScorers = core::decode_scorers(K);
  Ring<kStages> keys;
  Ring<K.q_stages> queries;
  Ring<kWeightStages> weights;  ///< where they have makers of their own
  Ring<1> ends;                 ///< of pieces, the same
  Ring<kWeightStages> scored;   ///< blocks whose keys have been multiplied, the same; nobody waits
                                ///< for empty ones, as weights are no further ahead

  static constexpr int kThreads = kLatentLoaders * 32;  ///< that arrive at a full buffer
  static constexpr int kOwners = 8;                     ///< warps

  __device__ __forceinline__ explicit LatentRings(LatentShared<K>& shared) {
    std::uint32_t barriers = ptx::shared_address(shared.barriers);
    keys = {ptx::shared_address(shared.ring), sizeof shared.ring[0], barriers,
            barriers + 8 * kStages};
    barriers += 16 * kStages;
    queries = {ptx::shared_address(shared.queries), sizeof shared.queries[0], barriers,
               barriers + 8 * K.q_stages};
    barriers += 16 * K.q_stages;
    weights = {ptx::shared_address(shared.weights), sizeof shared.weights[0], barriers,
               barriers + 8 * kWeightStages};
    barriers += 16 * kWeightStages;
    ends = {0, 0, barriers, barriers + 8};
    barriers += 16;
    scored = {0, 0, barriers, barriers + 8 * kWeightStages};
  }
  /// tells: warps arrive once more, after what they say of keys whose pages are skipped.
  __device__ __forceinline__ void initialise(bool tells) const {
    const int arrivals = kThreads + (tells ? kLatentLoaders : 0);
    if constexpr (kScorers == 0) {
      keys.initialise(arrivals, kOwners);
      queries.initialise(kThreads, kOwners);
    } else {
      keys.initialise(arrivals, kOwners + 4);
      queries.initialise(kThreads, 4 * kScorers);
      weights.initialise(4, kOwners);
      ends.initialise(4 * kScorers, kOwners);
      scored.initialise(4, kOwners);
    }
    ptx::fence_mbarrier_init();
  }
};

/// Whether nobody sees any key of a block in the ring, as all pages are skipped: it takes no
/// products.
template <core::Kernel K>
__device__ __forceinline__ bool is_skipped(const LatentShared<K>& shared, std::uint32_t item) {
  std::uint64_t keys;
  static_assert(sizeof keys == sizeof shared.skipped[0]);
  memcpy(&keys, shared.skipped[item % latent_stages(K)], sizeof keys);
  return agreed(keys == ~std::uint64_t{0});
}

/// The warpgroup that copies.
template <core::Kernel K>
class LatentLoads {
  static constexpr int kWarps = kLatentLoaders;
  static constexpr int kWarpKeys = K.block_n / kWarps;  ///< of a block, that a warp fetches
  static constexpr int kAtOnce = 4;                     ///< rows: 8 lanes have 128 bytes of one
  static constexpr int kChunksQ = K.head_dim_v / 64;    ///< of a query that meets values
  static constexpr std::uint32_t kChunk = K.block_n * 128;
  static_assert(K.head_dim == 64 && kWarpKeys == 16);

 public:
  __device__ __forceinline__ LatentLoads(const mma::DecodeParams& params, LatentShared<K>& shared)
      : p(params), shared_(shared), one_row_(!latent_chunked(K) && lies_in_one_row(params)) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (bool more = shared_.exists; more; more = walk().advance(piece())) {
      PlaceOfKey place = look_up(piece().tiles.begin, lane() % kWarpKeys);
#pragma unroll 1
      for (int tile = piece().tiles.begin; tile < piece().tiles.end; ++tile) {
        rings().keys.claim(item_);
        if constexpr (latent_chunked(K)) {
          load_chunks(place);
        } else {
          load_rows(place);
        }
        if (p.cache.pages.skips) tell_skipped(place);
        ++item_;
        if (tile == piece().tiles.begin) load_queries(piece());
        // Page numbers come while the next buffer is waited for.
        if (tile + 1 < piece().tiles.end) place = look_up(tile + 1, lane() % kWarpKeys);
      }
    }
    ptx::copy_wait<0>();
  }

  /// Asks the second-level cache for what may become the first blocks, and for the queries.
  __device__ __forceinline__ void prefetch(const mma::DecodePiece<K>& of) const {
    const auto ask = [this](std::uint64_t from, int bytes) {
      ptx::prefetch(reinterpret_cast<const void*>(from), static_cast<std::uint32_t>(bytes),
                    policy());
    };
    const int thread = warp() * 32 + lane();
    if (thread < of.rows) {
      const mma::DecodeRow at = mma::row_of<K>(of, p.group, thread);
      ask(query_of(p.q, of, at), p.head_dim * 2);
      ask(query_of(p.qv, of, at), p.head_dim_v * 2);
    }
    const core::Pages& pages = p.cache.pages;
    const bool value = lane() < kWarpKeys;
#pragma unroll 1
    for (int i = 0; i < kPrefetched && of.tiles.begin + i < of.tiles.end; ++i) {
      const core::Range keys = of.keys.from(of.tiles.begin + i);
      const int key = keys.begin + warp() * kWarpKeys + lane() % kWarpKeys;
      PlaceOfKey place = {of.sequence.entry_k, of.sequence.first_k + key, key < keys.end};
      if (pages.table != nullptr && place.exists) {
        const core::Pages::Place in_page = pages.place(place.slot, p.page_size);
        const std::int64_t at = place.entry * pages.stride + in_page.column;
        place.slot = in_page.slot;
        // As lengths, not from the first-level cache.
        place.entry = pages.ids == PageIds::i32
                          ? ptx::load_relaxed(static_cast<const std::int32_t*>(pages.table) + at)
                          : ptx::load_relaxed(static_cast<const std::int64_t*>(pages.table) + at);
      }
      if (!exists(place)) continue;
      if (value) {
        ask(row_of<kValueBytes>(p.v, of.head, place),
            one_row_ ? latent_row_bytes(K) : p.head_dim_v * kValueBytes);
      } else if (!one_row_) {
        ask(row_of<2>(p.k, of.head, place), p.head_dim * 2);
      }
    }
  }

 private:
  static constexpr int kValueBytes = core::widens(K) ? 1 : 2;
  static constexpr int kPrefetched = 1;  ///< blocks; more stand in the way of what others wait for

  // Made anew each time: there are few registers.

  __device__ __forceinline__ mma::DecodeWalk<K> walk() const {
    return {p, shared_.search, shared_.span_length};
  }
  __device__ __forceinline__ ptx::CachePolicy policy() const {
    return ptx::cache_policy(p.parts.blocks == 1);
  }
  __device__ __forceinline__ LatentRings<K> rings() const { return LatentRings<K>(shared_); }
  __device__ __forceinline__ static int warp() {
    return static_cast<int>(ptx::opaque(threadIdx.x)) / 32 % kWarps;
  }
  __device__ __forceinline__ static int lane() {
    return static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
  }
  __device__ __forceinline__ mma::DecodePiece<K>& piece() const {
    return shared_.pieces[(core::widens(K) ? ptx::opaque(threadIdx.x) : threadIdx.x) / 32];
  }

  /// Where a lane's key lies.
  struct PlaceOfKey {
    std::int64_t entry = 0;
    int slot = 0;
    bool exists = false;
  };

  /// Of the row-th of the warp's keys. A page's number is not looked at, so that nobody waits for
  /// it here.
  __device__ __forceinline__ PlaceOfKey look_up(int tile, int row) const {
    const core::Range keys = piece().keys.from(tile);
    const int key = keys.begin + warp() * kWarpKeys + row;
    PlaceOfKey place = {piece().sequence.entry_k, piece().sequence.first_k + key, key < keys.end};
    const core::Pages& pages = p.cache.pages;
    if (pages.table == nullptr || !place.exists) return place;
    const core::Pages::Place in_page = pages.place(place.slot, p.page_size);
    place.slot = in_page.slot;
    place.entry = pages.at(piece().sequence.entry_k, in_page.column);
    return place;
  }
  /// Whether a key that was looked up is one, whose page exists.
  __device__ __forceinline__ bool exists(const PlaceOfKey& place) const {
    const core::Pages& pages = p.cache.pages;
    return place.exists && (pages.table == nullptr || pages.exists(place.entry));
  }
  /// Which of the warp's keys no query sees, for who multiplies the block.
  __device__ __forceinline__ void tell_skipped(const PlaceOfKey& place) const {
    const std::uint32_t skipped = __ballot_sync(~0U, !place.exists || place.entry < 0);
    if (lane() == 0) {
      shared_.skipped[item_ % latent_stages(K)][warp()] = static_cast<std::uint16_t>(skipped);
      rings().keys.arrive_full(item_);
    }
    __syncwarp();
  }
  /// The first element of the lane's key, or its value, of so many bytes; 0: it does not exist.
  template <int kBytes>
  __device__ __forceinline__ std::uint64_t row_of(const Source& source, int head,
                                                  const PlaceOfKey& place) const {
    if (!exists(place)) return 0;
    return reinterpret_cast<std::uint64_t>(source.data) +
           (place.entry * source.strides.batch + place.slot * source.strides.seqlen +
            head * source.strides.head) *
               kBytes;
  }
  /// The first element of a piece's row of queries.
  __device__ __forceinline__ std::uint64_t query_of(const Source& source,
                                                    const mma::DecodePiece<K>& of,
                                                    const mma::DecodeRow& at) const {
    const int head = of.head * p.group.value() + at.member;
    return reinterpret_cast<std::uint64_t>(
        static_cast<const std::uint16_t*>(source.data) +
        of.sequence.query_offset(source.strides, at.query, head));
  }

  /// 16 bytes of a row of so many.
  __device__ __forceinline__ void copy(std::uint32_t to, std::uint64_t row, int byte,
                                       int bytes) const {
    const bool exists = row != 0 && byte < bytes;
    // What does not exist is not read, but its address must be one.
    const void* const from = exists ? reinterpret_cast<const char*>(row) + byte : p.q.data;
    ptx::copy_async(to, from, exists, policy());
  }

  /// Queries of a piece's rows, of keys and of values, and zeros.
  __device__ __forceinline__ void load_queries(const mma::DecodePiece<K>& piece) {
    rings().queries.claim(pieces_);
    const int unit = lane() % 8;
#pragma unroll 1
    for (int row = warp() * kAtOnce + lane() / 8; row < K.block_m; row += kWarps * kAtOnce) {
      const bool exists = row < piece.rows;
      const mma::DecodeRow at = mma::row_of<K>(piece, p.group, exists ? row : 0);
      const std::uint64_t q = exists ? query_of(p.q, piece, at) : 0;
      const std::uint64_t qv = exists ? query_of(p.qv, piece, at) : 0;
      const std::uint32_t to = rings().queries.buffer(pieces_) + row * 128 +
                               static_cast<std::uint32_t>(unit ^ row % 8) * 16;
      copy(to, q, unit * 16, p.head_dim * 2);
#pragma unroll
      for (int c = 0; c < kChunksQ; ++c) {
        copy(to + (1 + c) * K.block_m * 128, qv, c * 128 + unit * 16, p.head_dim_v * 2);
      }
    }
    ptx::copy_arrive(rings().queries.full_barrier(pieces_++));
  }

  /// Keys and values of a block in chunks of 128 bytes; what does not exist becomes 0. Keys are the
  /// first chunk, or the last beside values of 8 bits.
  __device__ __forceinline__ void load_chunks(const PlaceOfKey& place) const {
    constexpr int kValues = K.head_dim_v * kValueBytes / 128;
    constexpr int kKeysAt = core::widens(K) ? kValues : 0, kValuesAt = core::widens(K) ? 0 : 1;
    if constexpr (core::widens(K)) {
      load_scales(rings().keys.buffer(item_) + latent_scales_at(K) +
                      (warp() * kWarpKeys + lane() % kWarpKeys) * (4 * latent_groups(K)),
                  place);
    }
    const std::uint64_t key = row_of<2>(p.k, piece().head, place),
                        value = row_of<kValueBytes>(p.v, piece().head, place);
    const int unit = lane() % 8, line = lane() / 8;
    std::uint32_t to = first_row() + line * 128 + static_cast<std::uint32_t>(unit ^ line) * 16;
#pragma unroll 1
    for (int row = line; row < kWarpKeys; row += kAtOnce) {
      const std::uint64_t k = __shfl_sync(~0U, key, row), v = __shfl_sync(~0U, value, row);
      copy(to + kKeysAt * kChunk, k, unit * 16, p.head_dim * 2);
#pragma unroll
      for (int c = 0; c < kValues; ++c) {
        copy(to + (kValuesAt + c) * kChunk, v, c * 128 + unit * 16, p.head_dim_v * kValueBytes);
      }
      // The swizzle: four rows on, a unit lies 4 units further or back in its line.
      to = (to ^ 64) + kAtOnce * 128;
    }
    ptx::copy_arrive(rings().keys.full_barrier(item_));
  }

  /// The same in no chunks: value, scales and key of a row lie one after another.
  __device__ __forceinline__ void load_rows(const PlaceOfKey& place) const {
    if (one_row_ && !__any_sync(~0U, !exists(place))) {
      copy_rows(row_of<1>(p.v, piece().head, place));
    } else {
      load_apart(place);
      ptx::copy_arrive(rings().keys.full_barrier(item_));
    }
  }
  /// Rows that lie so in memory, too, by the copy engine: one by one, or the warp's at once where
  /// they are neighbours. row: that of the lane's key.
  __device__ __forceinline__ void copy_rows(std::uint64_t row) const {
    constexpr int kBytes = latent_row_bytes(K);
    const std::uint32_t full = rings().keys.full_barrier(item_);
    ptx::fence_proxy_async();  // rows that were copied one by one may have lain there
    const int key = lane() % kWarpKeys;
    const std::uint32_t to = own_rows() + key * kBytes;
    const bool neighbours = __all_sync(~0U, row == __shfl_sync(~0U, row, 0) + key * kBytes) != 0;
    const int rows = neighbours ? kWarpKeys : 1;
    if (lane() < (neighbours ? 1 : kWarpKeys)) {
      ptx::mbarrier_expect(full, rows * kBytes);
      ptx::bulk_load(to, reinterpret_cast<const void*>(row), rows * kBytes, full, policy());
    } else {
      ptx::mbarrier_arrive(full);
    }
  }
  /// Rows of any other layout, and those that do not exist.
  __device__ __forceinline__ void load_apart(const PlaceOfKey& place) const {
    static_assert(!core::widens(K) || K.head_dim_v == 32 * 16);
    load_scales(own_rows() + lane() % kWarpKeys * latent_row_bytes(K) + latent_scales_at(K), place);
    const std::uint64_t key = row_of<2>(p.k, piece().head, place),
                        value = row_of<1>(p.v, piece().head, place);
    const int unit = lane() % 8, line = lane() / 8;
#pragma unroll 1
    for (int row = line; row < kWarpKeys; row += kAtOnce) {
      copy(own_rows() + row * latent_row_bytes(K) + latent_key_at(K) + unit * 16,
           __shfl_sync(~0U, key, row), unit * 16, p.head_dim * 2);
    }
#pragma unroll 1
    for (int row = 0; row < kWarpKeys; ++row) {
      copy(own_rows() + row * latent_row_bytes(K) + lane() * 16, __shfl_sync(~0U, value, row),
           lane() * 16, p.head_dim_v);
    }
  }
  /// A lane has those of its key, of groups lane / 16 and 2 further on.
  __device__ __forceinline__ void load_scales(std::uint32_t to, const PlaceOfKey& place) const {
    constexpr int kGroups = latent_groups(K);
    const core::Scales& scale = p.v_scale;
    const float* from = scale.data;
    if (scale.of_slots()) {
      from += place.entry * scale.stride_batch + place.slot * scale.stride_seqlen;
    }
    if (scale.by == Scaling::head) from += piece().sequence.batch * scale.stride_batch;
    if (scale.by != Scaling::tensor) from += piece().head * scale.stride_head;
    const bool key_exists = exists(place), grouped = scale.by == Scaling::group;
#pragma unroll
    for (int i = 0; i < kGroups; i += 2) {
      const int group = i + lane() / kWarpKeys;
      const bool there = key_exists && group * core::kScaledColumns < p.head_dim_v;
      const float* const at = from + (grouped ? p.value_groups.quotient(group) : 0);
      ptx::copy_async_word(to + group * 4, there ? at : scale.data, there);
    }
  }
  /// Whether values, scales and keys are columns of one tensor of rows as they lie in the ring.
  __device__ __forceinline__ static bool lies_in_one_row(const mma::DecodeParams& p) {
    const core::Scales& scale = p.v_scale;
    const auto *k = static_cast<const char*>(p.k.data), *v = static_cast<const char*>(p.v.data),
               *scales = reinterpret_cast<const char*>(scale.data);
    const core::Strides of_k = p.k.strides, of_v = p.v.strides, of_scales = scale.strides();
    return scale.by == Scaling::group && p.value_groups.value() == 1 && p.head_dim == K.head_dim &&
           p.head_dim_v == K.head_dim_v && scales == v + K.head_dim_v &&
           k == v + latent_key_at(K) && of_k.batch * 2 == of_v.batch &&
           of_scales.batch * 4 == of_v.batch && of_k.seqlen * 2 == of_v.seqlen &&
           of_scales.seqlen * 4 == of_v.seqlen && of_k.head * 2 == of_v.head &&
           of_scales.head * 4 == of_v.head;
  }

  /// Of the warp's keys of 8 bits, in the item's buffer.
  __device__ __forceinline__ std::uint32_t own_rows() const {
    return rings().keys.buffer(item_) + warp() * kWarpKeys * latent_row_bytes(K);
  }
  /// Of the warp's keys in the first chunk of the item's buffer.
  __device__ __forceinline__ std::uint32_t first_row() const {
    return rings().keys.buffer(item_) + warp() * kWarpKeys * 128;
  }

  const mma::DecodeParams& p;
  LatentShared<K>& shared_;
  const bool one_row_;
  std::uint32_t item_ = 0, pieces_ = 0;  ///< next in the rings
};

}  // namespace tessera::cuda::sm90
