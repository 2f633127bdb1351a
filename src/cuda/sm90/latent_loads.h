// What the producing warps of the latent kernel (latent.h) ask memory for: blocks of 64 keys, each
// with its value, from wherever they lie, and the queries of a piece. Copies of 16 bytes take any
// page and stride; the producer walks by itself and is ahead in the next piece, too.
#pragma once

#include "cuda/mma/decode_walk.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/mma.h"
#include "cuda/sm90/latent_shape.h"
#include "cuda/sm90/ring.h"

namespace tessera::cuda::sm90 {

/// Of producers that widen, by warps: scales of the rows that are being stored.
template <core::Kernel K, bool kWidens = core::widens(K)>
struct LatentScales {};
template <core::Kernel K>
struct LatentScales<K, true> {
  float of[2 * kLatentLoaders][K.head_dim_v / core::kScaledColumns][K.block_n / kLatentLoaders];
};

/// Shared memory of a block of threads, from its first multiple of 1024 bytes.
template <core::Kernel K>
struct LatentShared {
  char queries[K.q_stages][latent_row_bytes(K, K.block_m)];
  char ring[kLatentStages][latent_row_bytes(K, K.block_n)];
  /// Of a block [keys][rows], 128 bytes a key. Between pieces: what becomes of rows.
  char weights[K.block_n * 128];

  std::uint64_t barriers[2 * (K.q_stages + kLatentStages)];
  mma::DecodePiece<K> pieces[core::decode_warps(K)];
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
  LatentScales<K> scales;
};

/// The rings, as both sides count them.
template <core::Kernel K>
struct LatentRings {
  Ring<kLatentStages> keys;
  Ring<K.q_stages> queries;

  /// Arrivals at a full buffer. Copies arrive thread by thread, rows that are stored warp by warp.
  static constexpr int kThreads = kLatentLoaders * 32;
  static constexpr int kProducers = core::widens(K) ? kLatentLoaders : kThreads;
  static constexpr int kConsumers = 8;  ///< warps

  __device__ __forceinline__ explicit LatentRings(LatentShared<K>& shared) {
    const std::uint32_t barriers = ptx::shared_address(shared.barriers);
    keys = {ptx::shared_address(shared.ring), sizeof shared.ring[0], barriers,
            barriers + 8 * kLatentStages};
    queries = {ptx::shared_address(shared.queries), sizeof shared.queries[0],
               barriers + 16 * kLatentStages, barriers + 16 * kLatentStages + 8 * K.q_stages};
  }
  __device__ __forceinline__ void initialise() const {
    keys.initialise(kProducers, kConsumers);
    queries.initialise(kThreads, kConsumers);
  }
};

/// What producers of either kind do alike.
template <core::Kernel K>
class LatentProducer {
 protected:
  static constexpr int kWarps = kLatentLoaders;
  static constexpr int kWarpKeys = K.block_n / kWarps;  ///< of a block, that a warp fetches
  static constexpr int kAtOnce = 4;                     ///< rows: 8 lanes have 128 bytes of one
  static constexpr int kChunksV = K.head_dim_v / 64;
  static_assert(K.head_dim == 64 && kWarpKeys == 16);

  __device__ __forceinline__ LatentProducer(const mma::DecodeParams& params,
                                            LatentShared<K>& shared)
      : p(params), shared_(shared), piece_(shared.pieces[threadIdx.x / 32]) {}

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

  /// Where a lane's key lies.
  struct PlaceOfKey {
    std::int64_t entry = 0;
    int slot = 0;
    bool exists = false;
  };

  /// Of the row-th of the warp's keys. A page's number is not looked at, so that nobody waits for
  /// it here.
  __device__ __forceinline__ PlaceOfKey look_up(int tile, int row) const {
    const core::Range keys = piece_.keys.from(tile);
    const int key = keys.begin + warp() * kWarpKeys + row;
    PlaceOfKey place = {piece_.sequence.entry_k, piece_.sequence.first_k + key, key < keys.end};
    const core::Pages& pages = p.cache.pages;
    if (pages.table == nullptr || !place.exists) return place;
    const core::Pages::Place in_page = pages.place(place.slot, p.page_size);
    place.slot = in_page.slot;
    place.entry = pages.at(piece_.sequence.entry_k, in_page.column);
    return place;
  }
  /// Whether a key that was looked up is one, whose page exists.
  __device__ __forceinline__ bool exists(const PlaceOfKey& place) const {
    const core::Pages& pages = p.cache.pages;
    return place.exists && (pages.table == nullptr || pages.exists(place.entry));
  }
  /// The first element of the lane's key, or its value, of so many bytes; 0: it does not exist.
  template <int kBytes>
  __device__ __forceinline__ std::uint64_t row_of(const Source& source,
                                                  const PlaceOfKey& place) const {
    if (!exists(place)) return 0;
    return reinterpret_cast<std::uint64_t>(source.data) +
           (place.entry * source.strides.batch + place.slot * source.strides.seqlen +
            piece_.head * source.strides.head) *
               kBytes;
  }

  __device__ __forceinline__ void copy(std::uint32_t to, std::uint64_t row, int column,
                                       int dim) const {
    const bool exists = row != 0 && column < dim;
    // What does not exist is not read, but its address must be one.
    const void* const from =
        exists ? reinterpret_cast<const std::uint16_t*>(row) + column : p.q.data;
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
      const int head = piece.head * p.group.value() + at.member;
      const auto of = [&](const Source& source) {
        return exists ? reinterpret_cast<std::uint64_t>(
                            static_cast<const std::uint16_t*>(source.data) +
                            piece.sequence.query_offset(source.strides, at.query, head))
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
  mma::DecodePiece<K>& piece_;
  std::uint32_t item_ = 0, pieces_ = 0;  ///< next in the rings
};

/// The warpgroup that copies.
template <core::Kernel K>
class LatentLoads : LatentProducer<K> {
  using Base = LatentProducer<K>;
  using Base::copy, Base::kAtOnce, Base::kChunksV, Base::kWarpKeys, Base::lane, Base::look_up,
      Base::rings, Base::warp;
  using typename Base::PlaceOfKey;

 public:
  __device__ __forceinline__ LatentLoads(const mma::DecodeParams& params, LatentShared<K>& shared)
      : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    const mma::DecodePiece<K>& piece = this->piece_;
#pragma unroll 1
    for (bool more = this->shared_.exists; more; more = this->walk().advance(this->piece_)) {
      PlaceOfKey place = look_up(piece.tiles.begin, lane() % kWarpKeys);
#pragma unroll 1
      for (int tile = piece.tiles.begin; tile < piece.tiles.end; ++tile) {
        rings().keys.claim(this->item_);
        load(place);
        ptx::copy_arrive(rings().keys.full_barrier(this->item_++));
        if (tile == piece.tiles.begin) this->load_queries(piece);
        // Page numbers come while the next buffer is waited for.
        if (tile + 1 < piece.tiles.end) place = look_up(tile + 1, lane() % kWarpKeys);
      }
    }
    ptx::copy_wait<0>();
  }

 private:
  /// Keys and values of a block; what does not exist becomes 0.
  __device__ __forceinline__ void load(const PlaceOfKey& place) const {
    const std::uint64_t key = this->template row_of<2>(this->p.k, place),
                        value = this->template row_of<2>(this->p.v, place);
    const int unit = lane() % 8, line = lane() / 8;
    std::uint32_t to = rings().keys.buffer(this->item_) + (warp() * kWarpKeys + line) * 128 +
                       static_cast<std::uint32_t>(unit ^ line) * 16;
#pragma unroll 1
    for (int row = line; row < kWarpKeys; row += kAtOnce) {
      const std::uint64_t k = __shfl_sync(~0U, key, row), v = __shfl_sync(~0U, value, row);
      copy(to, k, unit * 8, this->p.head_dim);
#pragma unroll
      for (int c = 0; c < kChunksV; ++c) {
        copy(to + (1 + c) * K.block_n * 128, v, c * 64 + unit * 8, this->p.head_dim_v);
      }
      // The swizzle: four rows on, a unit lies 4 units further or back in its line.
      to = (to ^ 64) + kAtOnce * 128;
    }
  }
};

}  // namespace tessera::cuda::sm90
