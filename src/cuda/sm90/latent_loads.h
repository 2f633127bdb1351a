// What the producing warpgroup of the latent kernel (latent.h) asks memory for: blocks of 64 keys,
// each with its value, from wherever they lie, and the queries of a piece. Copies of 16 bytes take
// any page and stride; the producer walks by itself and is ahead in the next piece, too.
#pragma once

#include "cuda/mma/decode_walk.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/mma.h"
#include "cuda/sm90/latent_shape.h"
#include "cuda/sm90/ring.h"

namespace tessera::cuda::sm90 {

/// Shared memory of a block of threads, from its first multiple of 1024 bytes.
template <core::Kernel K>
struct LatentShared {
  char queries[K.q_stages][latent_row_bytes(K, K.block_m)];
  char ring[kLatentStages][latent_row_bytes(K, K.block_n)];
  /// Of a block [keys][rows], 128 bytes a key. Between pieces: what becomes of rows.
  char weights[K.block_n * 128];

  std::uint64_t barriers[2 * (K.q_stages + kLatentStages)];
  mma::DecodePiece<K> pieces[mma::decode_warps(K)];
  /// What a consuming warp remembers where it has no registers.
  struct {
    core::Range plain;     ///< tiles of the piece whose keys all rows see
    std::uint32_t pieces;  ///< that had keys, before this one
  } warps[8];
  float shift[K.block_m];   ///< of rows, where it was last raised
  float factor[K.block_m];  ///< what has become of weights then
  int raised;               ///< whether the block's owner has
  bool exists;              ///< whether there is a first piece
  int span_length;          ///< of core::Spans
  mma::DecodeSearch<K> search;
};

/// The rings, as both sides count them.
template <core::Kernel K>
struct LatentRings {
  Ring<kLatentStages> keys;
  Ring<K.q_stages> queries;

  static constexpr int kProducers = 128, kConsumers = 8;  ///< threads, and warps

  __device__ __forceinline__ explicit LatentRings(LatentShared<K>& shared) {
    const std::uint32_t barriers = ptx::shared_address(shared.barriers);
    keys = {ptx::shared_address(shared.ring), sizeof shared.ring[0], barriers,
            barriers + 8 * kLatentStages};
    queries = {ptx::shared_address(shared.queries), sizeof shared.queries[0],
               barriers + 16 * kLatentStages, barriers + 16 * kLatentStages + 8 * K.q_stages};
  }
  __device__ __forceinline__ void initialise() const {
    keys.initialise(kProducers, kConsumers);
    queries.initialise(kProducers, kConsumers);
  }
};

template <core::Kernel K>
class LatentLoads {
  static constexpr int kWarpKeys = K.block_n / 4;  ///< that a warp copies
  static constexpr int kAtOnce = 4;                ///< rows: 8 lanes have 128 bytes of one
  static constexpr int kChunksV = K.head_dim_v / 64;
  static_assert(K.head_dim == 64 && kWarpKeys == 16);

 public:
  __device__ __forceinline__ LatentLoads(const mma::DecodeParams& params, LatentShared<K>& shared)
      : p(params),
        shared_(shared),
        walk_(params, shared.search, shared.span_length),
        piece_(shared.pieces[threadIdx.x / 32]),
        policy_(ptx::cache_policy(params.parts.blocks == 1)) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (bool more = shared_.exists; more; more = walk_.advance(piece_)) {
      PlaceOfKey place = look_up(piece_.tiles.begin);
#pragma unroll 1
      for (int tile = piece_.tiles.begin; tile < piece_.tiles.end; ++tile) {
        rings().keys.claim(item_);
        load(place);
        ptx::copy_arrive(rings().keys.full_barrier(item_++));
        if (tile == piece_.tiles.begin) load_queries();
        // Page numbers come while the next buffer is waited for.
        if (tile + 1 < piece_.tiles.end) place = look_up(tile + 1);
      }
    }
    ptx::copy_wait<0>();
  }

 private:
  /// Made anew each time: there are few registers.
  __device__ __forceinline__ LatentRings<K> rings() const { return LatentRings<K>(shared_); }
  __device__ __forceinline__ int warp() const {
    return static_cast<int>(ptx::opaque(threadIdx.x)) / 32 % 4;
  }
  __device__ __forceinline__ int lane() const {
    return static_cast<int>(ptx::opaque(threadIdx.x)) % 32;
  }

  /// Where a lane's key lies: lane i has the i-th of the warp's keys of a block, and so has lane
  /// 16 + i.
  struct PlaceOfKey {
    std::int64_t entry = 0;
    int slot = 0;
    bool exists = false;
  };

  __device__ __forceinline__ PlaceOfKey look_up(int tile) const {
    const core::Range keys = piece_.keys.from(tile);
    const int key = keys.begin + warp() * kWarpKeys + lane() % kWarpKeys;
    PlaceOfKey place = {piece_.sequence.entry_k, piece_.sequence.first_k + key, key < keys.end};
    const core::Pages& pages = p.cache.pages;
    if (pages.table == nullptr || !place.exists) return place;
    const core::Pages::Place in_page = pages.place(place.slot, p.page_size);
    place.slot = in_page.slot;
    place.entry = pages.at(piece_.sequence.entry_k, in_page.column);
    place.exists = pages.exists(place.entry);
    return place;
  }
  /// The first element of the lane's key, or its value; 0: it does not exist.
  __device__ __forceinline__ std::uint64_t row_of(const Source& source,
                                                  const PlaceOfKey& place) const {
    if (!place.exists) return 0;
    return reinterpret_cast<std::uint64_t>(
        static_cast<const std::uint16_t*>(source.data) + place.entry * source.strides.batch +
        place.slot * source.strides.seqlen + piece_.head * source.strides.head);
  }

  /// Keys and values of a block; what does not exist becomes 0.
  __device__ __forceinline__ void load(const PlaceOfKey& place) const {
    const std::uint64_t key = row_of(p.k, place), value = row_of(p.v, place);
    const int unit = lane() % 8, line = lane() / 8;
    std::uint32_t to = rings().keys.buffer(item_) + (warp() * kWarpKeys + line) * 128 +
                       static_cast<std::uint32_t>(unit ^ line) * 16;
#pragma unroll 1
    for (int row = line; row < kWarpKeys; row += kAtOnce) {
      const std::uint64_t k = __shfl_sync(~0U, key, row), v = __shfl_sync(~0U, value, row);
      copy(to, k, unit * 8, p.head_dim);
#pragma unroll
      for (int c = 0; c < kChunksV; ++c) {
        copy(to + (1 + c) * K.block_n * 128, v, c * 64 + unit * 8, p.head_dim_v);
      }
      // The swizzle: four rows on, a unit lies 4 units further or back in its line.
      to = (to ^ 64) + kAtOnce * 128;
    }
  }
  __device__ __forceinline__ void copy(std::uint32_t to, std::uint64_t row, int column,
                                       int dim) const {
    const bool exists = row != 0 && column < dim;
    // What does not exist is not read, but its address must be one.
    const void* const from =
        exists ? reinterpret_cast<const std::uint16_t*>(row) + column : p.k.data;
    ptx::copy_async(to, from, exists, policy_);
  }

  /// Queries of the piece's rows, of keys and of values, and zeros.
  __device__ __forceinline__ void load_queries() {
    rings().queries.claim(pieces_);
    const int unit = lane() % 8;
#pragma unroll 1
    for (int row = warp() * kAtOnce + lane() / 8; row < K.block_m; row += 4 * kAtOnce) {
      const bool exists = row < piece_.rows;
      const mma::DecodeRow at = mma::row_of<K>(piece_, p.group, exists ? row : 0);
      const int head = piece_.head * p.group.value() + at.member;
      const auto of = [&](const Source& source) {
        return exists ? reinterpret_cast<std::uint64_t>(
                            static_cast<const std::uint16_t*>(source.data) +
                            piece_.sequence.query_offset(source.strides, at.query, head))
                      : 0;
      };
      const std::uint64_t q = of(p.q), qv = of(p.qv);
      const std::uint32_t to = rings().queries.buffer(pieces_) + row * 128 +
                               static_cast<std::uint32_t>(unit ^ row % 8) * 16;
      copy(to, q, unit * 8, p.head_dim);
#pragma unroll
      for (int c = 0; c < kChunksV; ++c) {
        copy(to + (1 + c) * K.block_m * 128, qv, c * 64 + unit * 8, p.head_dim_v);
      }
    }
    ptx::copy_arrive(rings().queries.full_barrier(pieces_++));
  }

  const mma::DecodeParams& p;
  LatentShared<K>& shared_;
  mma::DecodeWalk<K> walk_;
  mma::DecodePiece<K>& piece_;
  const ptx::CachePolicy policy_;
  std::uint32_t item_ = 0, pieces_ = 0;  ///< next in the rings
};

}  // namespace tessera::cuda::sm90
