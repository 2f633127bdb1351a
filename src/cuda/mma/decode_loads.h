// What a decoding warp asks memory for: tiles of keys and values into its ring, ahead of those that
// are multiplied, in the next piece, too; queries of that piece; page numbers before the keys that
// lie there.
#pragma once

#include "cuda/mma/decode_results.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/mma.h"

namespace tessera::cuda::mma {

/// Shared address of a 16-byte unit of a row, in chunks of 64 columns of 16 bits, swizzled.
template <int kChunkRows = kTileKeys>
__device__ __forceinline__ constexpr std::uint32_t place(int row, int unit) {
  return unit / 8 * (kChunkRows * kChunkBytes) + row * kChunkBytes + (unit % 8 ^ row % 8) * 16;
}

/// Where warps have their tiles, a stage each. Each its own; or, where they multiply together, the
/// tiles of a step side by side, as if they were one of all warps' keys.
template <core::Kernel K>
class DecodeRing {
  static constexpr int kTiles = together(K) ? decode_warps(K) : 1;  ///< in a chunk

 public:
  static constexpr int kChunkRows = kTiles * kTileKeys;
  static constexpr int kValues =
      kTiles * decode_key_bytes(K);  ///< from a tile's keys to its values
  __device__ __forceinline__ char* tile(int warp, int stage) {
    return together(K) ? at(0, stage) + warp * kTileKeys * kChunkBytes : at(warp, stage);
  }
  /// As many bytes as a tile has, of a stage that holds none of any warp.
  __device__ __forceinline__ char* at(int warp, int stage) {
    const int number = together(K) ? stage * decode_warps(K) + warp : warp * K.stages + stage;
    return bytes_ + number * decode_stage_bytes(K);
  }

 private:
  char bytes_[decode_ring_bytes(K)];
};

/// Shared memory of a block, from its first multiple of kAlignment bytes.
template <core::Kernel K>
struct DecodeShared {
  char queries[2][core::chunk_bytes(K.head_dim * 2, kTileKeys)];  ///< of a piece and the next
  DecodeRing<K> ring;
  DecodePiece<K> pieces[decode_warps(K)][2];
  DecodePiece<K> first;  ///< of the span, where prefixes are read once
  /// What products of queries are multiplied by, as these lie here.
  float query_factors[core::widens(K) ? K.block_m : 1];
  DecodeExchange<K> exchange;
  DecodeSearch<K> search;
};

/// Of one warp.
template <core::Kernel K>
class DecodeLoads {
  using Element = typename CachedElement<cached_size(K)>::Type;
  static constexpr int kWarps = decode_warps(K), kTeams = decode_teams(K), kStages = K.stages;
  static constexpr int kParts = core::mma_parts(K);  ///< warps of a team
  static constexpr bool kWidens = core::widens(K);
  static constexpr int kSize = cached_size(K), kUnit = 16 / kSize;  ///< elements of 16 bytes
  /// 16-byte units of a row: of the warp's columns; of a query all.
  static constexpr int kUnits = decode_columns(K) / kUnit,
                       kUnitsV = decode_value_columns(K) / kUnit, kUnitsQ = K.head_dim / 8;
  static constexpr int kChunkRows = DecodeRing<K>::kChunkRows, kValues = DecodeRing<K>::kValues;
  static constexpr int kPrefetched = 2;  ///< tiles of a team
  static_assert((kUnits & (kUnits - 1)) == 0 && (kUnitsV & (kUnitsV - 1)) == 0);

 public:
  /// Tiles that a warp has under way; beside them its output has room. With only one the next one
  /// must be asked for before the one that is there has been multiplied.
  static constexpr int kAhead = kStages - output_stages(K);
  static_assert(kAhead >= (kParts > 1 ? 1 : 2));
  static_assert(sizeof(DecodeShared<K>) + ring_alignment(K) <= decode_bytes(K));

  __device__ __forceinline__ DecodeLoads(const DecodeParams& params, DecodeShared<K>& shared)
      : p(params),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        shared_(shared),
        walk_(params, shared.search),
        policy_(ptx::cache_policy(params.parts.blocks == 1)),
        paged_(params.cache.pages.table != nullptr),
        whole_rows_(params.head_dim == K.head_dim &&
                    params.head_dim_v == K.head_dim_v * core::value_passes(K)) {}

  __device__ __forceinline__ const DecodeWalk<K>& walk() const { return walk_; }
  /// What is multiplied.
  __device__ __forceinline__ DecodePiece<K>& piece() const { return shared_.pieces[warp_][now_]; }
  /// Its queries.
  __device__ __forceinline__ char* queries() const { return shared_.queries[now_]; }
  /// Of keys and values where loads are.
  __device__ __forceinline__ const float (&scales() const)[2] { return scales_; }

  /// A row of q.
  __device__ __forceinline__ const std::uint16_t* query(const DecodePiece<K>& of,
                                                        const DecodeRow& row) const {
    const DecodeQuery at = query_of<K>(p, of, row.query);
    return static_cast<const std::uint16_t*>(p.q.data) +
           at.sequence.query_offset(p.q.strides, at.query, of.head * p.group.value() + row.member);
  }

  /// Are loads in the next piece? Is there one?
  /// @{
  __device__ __forceinline__ bool ahead() const { return ahead_; }
  __device__ __forceinline__ bool more() const { return more_; }
  /// @}
  /// Has the piece no tile that is not loaded yet, and is the next one not known?
  __device__ __forceinline__ bool done_with_piece() const { return !loading_ && !ahead_; }
  /// Loads that bring as many tiles under way as there may be.
  __device__ __forceinline__ int owed() const { return under_way_ < kAhead ? kAhead : 0; }

  /// The first of the tiles under way has been multiplied.
  __device__ __forceinline__ void release() { --under_way_; }
  /// The next piece becomes the piece.
  __device__ __forceinline__ void turn() {
    now_ = 1 - now_;
    ahead_ = false;
  }
  /// All warps have their parts of the queries that were asked for last.
  __device__ __forceinline__ void meet_queries() const {
    // They were in the group of the next tile, or in one before it.
    if (under_way_ == kAhead) {
      ptx::copy_wait<kAhead - 1>();
    } else {
      ptx::copy_commit();
      ptx::copy_wait<0>();
    }
    __syncthreads();
  }

  /// A group of copies: the next tile's, if there is one and a stage for it.
  __device__ __forceinline__ void next() {
    if (loading_ && under_way_ < kAhead) {
      const DecodePiece<K>& from = loaded_piece();
      load(from, shared_.ring.tile(warp_, to_));
      to_ = to_ + 1 == kStages ? 0 : to_ + 1;
      ++under_way_;
      next_ += kTeams;
      loading_ = in_step(next_) < from.tiles.end;
      half_ = kTileKeys - half_;
      if (loading_ && half_ == 0) look_up(from);
    }
    ptx::copy_commit();
  }
  /// Loads go on with the next piece, if there is one.
  __device__ __forceinline__ void advance() {
    ahead_ = true;
    more_ = walk_.next(piece(), next_piece(), [this](const DecodePiece<K>& of) { prefetch(of); });
    if (!more_) return;
    const DecodePiece<K>& of = next_piece();
    if constexpr (K.prefixes) {
      if (!begun_ && warp_ == 0) walk_.put(of, shared_.first);
      begun_ = true;
      policy_ = ptx::cache_policy(of.prefix == 0 && of.blocks == 1);
    }
    load_queries(of);
    if constexpr (kWidens) {
      scales_[0] = scale_of(p.k_scale, of);
      scales_[1] = scale_of(p.v_scale, of);
      first_scale_ = first_scale(of);
    }
    keys_ = rows_of<kUnits>(p.k, of) + key_column();
    values_ = rows_of<kUnitsV>(p.v, of) + value_column(of);
    next_ = of.tiles.begin + team();
    loading_ = in_step(next_) < of.tiles.end;
    half_ = 0;
    if (loading_) look_up(of);
  }

  /// Of a step's tiles, one a team, the first: where warps may read each other's, all of them load
  /// alike, tiles beyond the last one, too, of zeros. Elsewhere the warp's own is all it knows of.
  __device__ __forceinline__ int in_step(int tile) const {
    return together(K) ? tile - warp_ : tile;
  }

 private:
  /// Where a lane's key lies: lanes 0 to 15 have the keys of a tile, the others of the team's next.
  struct PageOfKey {
    int slot = 0, number = 0;
    std::int64_t wide = 0;  ///< instead of number
  };

  __device__ __forceinline__ int team() const { return warp_ / kParts; }
  __device__ __forceinline__ DecodePiece<K>& next_piece() const {
    return shared_.pieces[warp_][1 - now_];
  }
  /// Of the tile next_.
  __device__ __forceinline__ const DecodePiece<K>& loaded_piece() const {
    return shared_.pieces[warp_][ahead_ ? 1 - now_ : now_];
  }

  /// What all of a piece's keys or values are multiplied by; 1 where each has a scale of its own.
  __device__ __forceinline__ float scale_of(const core::Scales& scales,
                                            const DecodePiece<K>& of) const {
    return scales.of_slots() ? 1.0F : *scales.of(of.sequence, of.head);
  }

  /// Queries of all rows, and zeros: the warp's share of the next piece's.
  __device__ __forceinline__ void load_queries(const DecodePiece<K>& of) const {
    if (spreads_rows<K>(of)) return;  // every warp reads its own
    const std::uint32_t to = ptx::shared_address(shared_.queries[1 - now_]);
    for (int i = static_cast<int>(threadIdx.x); i < kWarpRows * kUnitsQ; i += kWarps * 32) {
      const int row = i / kUnitsQ, unit = i % kUnitsQ;
      const bool exists = row < of.rows && unit * 8 < p.head_dim;
      const DecodeRow at = mma::row_of<K>(of, p.group, row);
      const std::uint16_t* const from = query(of, at) + unit * 8;
      ptx::copy_async(to + place(row, unit), exists ? from : p.q.data, exists);
    }
  }

  /// With pages: in which one lies the lane's key of the next two tiles. It takes as long to come
  /// as keys do, so nothing is made of it before they are asked for.
  __device__ __forceinline__ void look_up(const DecodePiece<K>& from) {
    if (!paged_) return;
    static_assert(kTileKeys == 16);
    const core::Range keys = from.keys.from(next_ + lane_ / kTileKeys * kTeams);
    const core::Pages& pages = p.cache.pages;
    const int slot =
        from.sequence.first_k + core::min(keys.begin + lane_ % kTileKeys, keys.end - 1);
    const core::Pages::Place place = pages.place(slot, p.page_size);
    page_.slot = place.slot;
    const std::int64_t at = from.sequence.entry_k * pages.stride + place.column;
    if (pages.ids == PageIds::i32) {
      page_.number = static_cast<const std::int32_t*>(pages.table)[at];
    } else {
      page_.wide = static_cast<const std::int64_t*>(pages.table)[at];
    }
  }

  /// Asks the second-level cache for what may become the team's first tiles, and for the queries.
  __device__ __forceinline__ void prefetch(const DecodePiece<K>& of) const {
    if (warp_ == 0 && lane_ < of.rows) {
      const DecodeRow at = mma::row_of<K>(of, p.group, lane_);
      ptx::prefetch(query(of, at), static_cast<std::uint32_t>(p.head_dim) * 2, policy_);
    }
    if (warp_ % kParts != 0) return;
    const bool value = lane_ >= kTileKeys;
    const Source& source = value ? p.v : p.k;
    const auto* const head = static_cast<const Element*>(source.data) +
                             of.head * source.strides.head + (value ? of.column() : 0);
    int tile = of.tiles.begin + team();
#pragma unroll 1
    for (int i = 0; i < kPrefetched && tile < of.tiles.end; ++i, tile += kTeams) {
      const core::Range keys = of.keys.from(tile);
      const int key = keys.begin + lane_ % kTileKeys;
      if (key >= keys.end) continue;
      int slot = of.sequence.first_k + key;
      std::int64_t entry = of.sequence.entry_k;
      if (paged_) {
        const core::Pages& pages = p.cache.pages;
        const core::Pages::Place place = pages.place(slot, p.page_size);
        const std::int64_t at = entry * pages.stride + place.column;
        slot = place.slot;
        // As lengths, not from the first-level cache.
        entry = pages.ids == PageIds::i32
                    ? ptx::load_relaxed(static_cast<const std::int32_t*>(pages.table) + at)
                    : ptx::load_relaxed(static_cast<const std::int64_t*>(pages.table) + at);
        if (!pages.exists(entry)) continue;
      }
      ptx::prefetch(
          head + entry * source.strides.batch + slot * source.strides.seqlen,
          static_cast<std::uint32_t>(value ? p.head_dim_v - of.column() : p.head_dim) * kSize,
          policy_);
    }
  }

  /// The lane's unit of the lane's row of a tile that would begin at slot 0 of page 0; without
  /// pages at the sequence's first slot.
  template <int kRowUnits>
  __device__ __forceinline__ const Element* rows_of(const Source& source,
                                                    const DecodePiece<K>& of) const {
    const core::Strides& strides = source.strides;
    std::int64_t slot = lane_ / kRowUnits;
    std::int64_t offset = of.head * strides.head + lane_ % kRowUnits * kUnit;
    if (!paged_) {
      offset += of.sequence.entry_k * strides.batch;
      slot += of.sequence.first_k;
    }
    return static_cast<const Element*>(source.data) + offset + slot * strides.seqlen;
  }

  /// The warp's first column, of keys and of a piece's values; and those that exist from there on,
  /// below 0 if it does not.
  /// @{
  __device__ __forceinline__ int key_column() const { return warp_ % kParts * decode_columns(K); }
  __device__ __forceinline__ int value_column(const DecodePiece<K>& of) const {
    return of.column() + warp_ % kParts * decode_value_columns(K);
  }
  __device__ __forceinline__ int key_columns() const { return p.head_dim - key_column(); }
  __device__ __forceinline__ int value_columns(const DecodePiece<K>& of) const {
    return p.head_dim_v - value_column(of);
  }
  /// @}
  /// Keys and values of the next tile.
  __device__ __forceinline__ void load(const DecodePiece<K>& from, char* stage) const {
    const std::uint32_t to = ptx::shared_address(stage);
    const core::Range keys = from.keys.from(next_);
    int left = keys.end - keys.begin, slot = keys.begin;
    std::int64_t page = 0;
    if (paged_) {
      const core::Pages& pages = p.cache.pages;
      const std::int64_t mine = pages.ids == PageIds::i32 ? page_.number : page_.wide;
      slot = __shfl_sync(~0U, page_.slot, half_);
      if (slot + kTileKeys > pages.size) {
        const bool exists = lane_ % kTileKeys < left && pages.exists(mine);
        const unsigned rows = __ballot_sync(~0U, exists) >> half_;
        const auto at = [&](const Source& source) {
          const core::Strides& strides = source.strides;
          const std::int64_t offset =
              mine * strides.batch + page_.slot * strides.seqlen + from.head * strides.head;
          return static_cast<const Element*>(source.data) + (exists ? offset : 0);
        };
        load_placed<kUnits>(to, at(p.k), key_column(), p.head_dim, rows);
        load_placed<kUnitsV>(to + kValues, at(p.v), value_column(from), p.head_dim_v, rows);
        if constexpr (kWidens) {
          const int key = lane_ % kTileKeys;
          load_scale(to, __shfl_sync(~0U, mine, half_ + key),
                     __shfl_sync(~0U, page_.slot, half_ + key), (rows >> key & 1) != 0);
        }
        return;
      }
      page = __shfl_sync(~0U, mine, half_);
      if (!pages.exists(page)) left = 0;
    }
    const auto at = [&](const Element* rows, const Source& source) {
      if (paged_) rows += page * source.strides.batch;
      return rows + slot * source.strides.seqlen;
    };
    load_rows<kUnits>(to, p.k, at(keys_, p.k), key_columns(), left);
    load_rows<kUnitsV>(to + kValues, p.v, at(values_, p.v), value_columns(from), left);
    if constexpr (kWidens) {
      const int key = lane_ % kTileKeys;
      load_scale(to, page, slot + key, key < left);
    }
  }
  /// By token: lanes 0 to 15 load the scales of a tile's keys, the others those of its values.
  __device__ __forceinline__ const core::Scales& slot_scales() const {
    return lane_ < kTileKeys ? p.k_scale : p.v_scale;
  }
  /// The one of slot 0 of page 0; without pages of the sequence's first slot.
  __device__ __forceinline__ const float* first_scale(const DecodePiece<K>& of) const {
    const core::Scales& scales = slot_scales();
    if (!scales.of_slots()) return nullptr;
    std::int64_t at = of.head * scales.stride_head;
    if (!paged_) {
      at += of.sequence.entry_k * scales.stride_batch + of.sequence.first_k * scales.stride_seqlen;
    }
    return scales.data + at;
  }
  __device__ __forceinline__ void load_scale(std::uint32_t to, std::int64_t page, int slot,
                                             bool exists) const {
    if (first_scale_ == nullptr) return;
    const core::Scales& scales = slot_scales();
    const float* from = first_scale_ + slot * scales.stride_seqlen;
    if (paged_) from += page * scales.stride_batch;
    ptx::copy_async_word(to + kValues + decode_value_bytes(K) + lane_ * 4,
                         exists ? from : scales.data, exists);
  }

  /// Rows side by side, from the lane's unit on; what does not exist becomes 0.
  template <int kRowUnits>
  __device__ __forceinline__ void load_rows(std::uint32_t to, const Source& source,
                                            const Element* from, int dim, int left) const {
    constexpr int kAtOnce = rows_at_once(kRowUnits);
    const int unit = lane_ % kRowUnits, row = lane_ / kRowUnits;
    const std::int64_t step = kAtOnce * source.strides.seqlen;
    to += place<kChunkRows>(row, unit);
    if (whole_rows_ && left >= kTileKeys) {
#pragma unroll
      for (int i = 0; i < kTileKeys; i += kAtOnce) {
#pragma unroll
        for (int c = 0; c < kRowUnits; c += 32) {
          ptx::copy_async((beside(to, c) ^ i % 8 * 16) + i * 128, from + c * kUnit, policy_);
        }
        from += step;
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kTileKeys; i += kAtOnce) {
#pragma unroll
      for (int c = 0; c < kRowUnits; c += 32) {
        const bool exists = (c + unit) * kUnit < dim && row + i < left;
        // A row that does not exist is not read, but its address must be one.
        const void* const at = exists ? from + c * kUnit : source.data;
        ptx::copy_async((beside(to, c) ^ i % 8 * 16) + i * 128, at, exists, policy_);
      }
      from += step;
    }
  }
  /// The same of rows that lie anywhere, from a column on: row i where lane half_ + i says, if bit
  /// i of `rows` says that it exists.
  template <int kRowUnits>
  __device__ __forceinline__ void load_placed(std::uint32_t to, const Element* from, int column,
                                              int dim, unsigned rows) const {
    constexpr int kAtOnce = rows_at_once(kRowUnits);
    const int unit = lane_ % kRowUnits, row = lane_ / kRowUnits;
    rows >>= row;
    to += place<kChunkRows>(row, unit);
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kAtOnce) {
      const auto* const row_from = reinterpret_cast<const Element*>(
          __shfl_sync(~0U, reinterpret_cast<std::uint64_t>(from), half_ + row + i));
#pragma unroll
      for (int c = 0; c < kRowUnits; c += 32) {
        // What does not exist is not read, but its address must be one.
        const int at = column + (c + unit) * kUnit;
        const bool inside = at < dim;
        ptx::copy_async((beside(to, c) ^ i % 8 * 16) + i * 128, row_from + (inside ? at : 0),
                        inside && (rows >> i & 1) != 0, policy_);
      }
    }
  }
  /// So many units, a multiple of 32, on in the same row.
  __device__ __forceinline__ static constexpr std::uint32_t beside(std::uint32_t to, int units) {
    return to + units / 8 * kChunkRows * kChunkBytes;
  }
  /// Rows of so many 16-byte units that a warp copies together.
  __device__ __forceinline__ static constexpr int rows_at_once(int units) {
    return units <= 32 ? 32 / units : 1;
  }

  const DecodeParams& p;
  const int warp_, lane_;
  DecodeShared<K>& shared_;
  DecodeWalk<K> walk_;
  ptx::CachePolicy policy_;  ///< of keys, which are read once, but for many rows
  const bool paged_;
  const bool whole_rows_;            ///< they have as many columns as there is room for
  bool begun_ = false;               ///< the span's first piece is known
  int now_ = 0;                      ///< of the warp's two pieces
  bool ahead_ = false;               ///< loads are in the next piece
  bool more_ = true;                 ///< there is one, where they are
  bool loading_ = false;             ///< tile next_ exists
  int next_ = 0;                     ///< tile to be loaded
  const Element* keys_ = nullptr;    ///< rows_of() them, in the piece that is loaded
  const Element* values_ = nullptr;  ///< the same
  PageOfKey page_;                   ///< of the lane's key
  int half_ = 0;                     ///< the first of the lanes that have the keys of tile next_
  int under_way_ = 0;                ///< tiles loaded, but not multiplied
  int to_ = 0;                       ///< of the ring
  float scales_[2];                  ///< rows that widen
  const float* first_scale_;         ///< the same: first_scale()
};

}  // namespace tessera::cuda::mma
