// Decoding: few query rows against many keys, at the speed of memory (FlashDecoding: Dao, Haziza,
// Massa, Sizov 2023). All query heads of a group and their queries share one axis of rows
// (core::Rows), at most 16, so a key/value head is read once. Blocks stay on their multiprocessors
// and take equal spans of all keys (decode_walk.h). A block's warps take tiles of 16 keys in turn,
// each with a ring, a softmax and an output of its own, and meet only where the block is done with
// an item (decode_results.h).
//
// Any GPU with cp.async, ldmatrix and mma.sync.
#pragma once

#include "core/storage.h"
#include "cuda/mma/decode_results.h"
#include "cuda/mma/decode_walk.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/extras.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class Decoder {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kRows = K.block_m, kWarps = decode_warps(K), kStages = decode_stages(K);
  static constexpr int kChunks = core::ceil_div(K.head_dim, kColumns);
  static constexpr int kChunksV = core::ceil_div(K.head_dim_v, kColumns);
  static constexpr int kKeyBytes = chunk_bytes(K.head_dim), kValueBytes = chunk_bytes(K.head_dim_v);
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static_assert(DecodeResults<K>::kFloats * 4 <= decode_ring_bytes(K));
  static_assert(kTileKeys * 8 % 32 == 0 && (kChunks & (kChunks - 1)) == 0);

 public:
  __device__ __forceinline__ Decoder(const DecodeParams& params, char* shared)
      : p(params),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        queries_((ptx::shared_address(shared) + 127) / 128 * 128),
        ring_(queries_ + kKeyBytes + warp_ * kStages * kStageBytes),
        exchange_(reinterpret_cast<float*>(shared +
                                           (queries_ + kKeyBytes - ptx::shared_address(shared)))),
        walk_(params, *reinterpret_cast<DecodeShared*>(exchange_ + decode_ring_bytes(K) / 4)),
        w_(1.0F) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (walk_.next()) {
      const core::Range units = walk_.units;
      const int together = p.parts.by_unit ? 1 : units.size();
#pragma unroll 1
      for (int unit = units.begin; unit < units.end; unit += together) {
        attend_part({unit * p.unit_tiles,
                     core::min((unit + together) * p.unit_tiles, walk_.item.tiles.count())});
        DecodeResults<K>(p, walk_, exchange_).write_part(unit, w_, o_);
      }
      DecodeResults<K>(p, walk_, exchange_).merge_parts();
    }
  }

 private:
  /// The output and state of a warp's keys among some of the item's tiles.
  __device__ __forceinline__ void attend_part(core::Range tiles) {
    const DecodeItem& item = walk_.item;
    end_ = tiles.end;
    count_ = core::min(kRows, static_cast<int>(item.rows.count()));
    for (int half = 0; half < 2; ++half) {
      query_[half] = item.rows.query_of(core::min(row_of(half), core::max(count_ - 1, 0)));
    }
    common_ = mask().common_keys({0, item.sequence.seqlen_q});
    const int first = tiles.begin + warp_;
    Place places[kStages - 1];
    if (paged()) {
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) places[i] = place_of(first + i * kWarps);
    }
    load_queries();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load(first + i * kWarps, i, places[i]);
    if (paged()) next_ = place_of(first + (kStages - 1) * kWarps);
    // The queries were in the first group.
    ptx::copy_wait<kStages - 2>();
    __syncthreads();
    hold_queries();
    w_.reset();
#pragma unroll
    for (float& x : o_) x = 0.0F;
    int stage = 0;
#pragma unroll 1
    for (int tile = first; tile < end_; tile += kWarps) {
      ptx::copy_wait<kStages - 2>();
      __syncwarp();
      attend(tile, stage);
      __syncwarp();
      const int coming = tile + (kStages - 1) * kWarps;
      load(coming, stage == 0 ? kStages - 1 : stage - 1, next_);
      if (paged()) next_ = place_of(coming + kWarps);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    ptx::copy_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ core::SequenceMask mask() const {
    return p.mask.of(p.sequences, walk_.item.sequence);
  }
  __device__ __forceinline__ bool paged() const { return p.cache.pages.table != nullptr; }

  /// Of the block, the lane's half-th row (of two).
  __device__ __forceinline__ int row_of(int half) const { return lane_ / 4 + 8 * half; }

  // ---- loads ----

  /// Shared address of a 16-byte unit of a row, in chunks of 64 columns, swizzled.
  __device__ __forceinline__ static std::uint32_t place(int row, int unit) {
    return unit / 8 * (kTileKeys * 128) + row * 128 + (unit % 8 ^ row % 8) * 16;
  }
  /// Where the i-th two units after those at `first` are, a multiple of two units from a row's
  /// start.
  __device__ __forceinline__ static std::uint32_t columns(std::uint32_t first, int i) {
    return (first ^ i % 4 * 32) + i / 4 * (kTileKeys * 128);
  }

  /// Queries of all rows, and zeros. A part of the first group of copies.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kUnits = kChunks * 8;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kUnits; i += kWarps * 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const bool exists = row < count_ && unit * 8 < p.head_dim;
      const DecodeItem& item = walk_.item;
      const int of = exists ? row : 0;
      const int head = item.head * p.group + item.rows.member_of(of);
      const auto* const from =
          static_cast<const std::uint16_t*>(p.q.data) +
          item.sequence.query_offset(p.q.strides, item.rows.query_of(of), head) +
          (exists ? unit * 8 : 0);
      ptx::copy_async(queries_ + place(row, unit), exists ? from : p.q.data, exists);
    }
  }

  /// Where the rows of a key lie that does not exist.
  static constexpr std::int64_t kNowhere = -0x7FFF'FFFF'FFFF'FFFF;
  /// Elements from the start of k and of v to a key's rows, with pages.
  struct Place {
    std::int64_t k, v;
  };
  /// Of key lane % 16 of a tile. The next tile's are found while a tile is multiplied: page numbers
  /// take as long to come as keys.
  __device__ __forceinline__ Place place_of(int tile) const {
    const core::Range keys = walk_.item.tiles.from(tile);
    const core::Sequence& sequence = walk_.item.sequence;
    const core::Pages& pages = p.cache.pages;
    const int key = keys.begin + lane_ % kTileKeys;
    if (tile >= end_ || key >= keys.end) return {kNowhere, kNowhere};
    const int slot = sequence.first_k + key, column = slot / pages.size;
    const std::int64_t page = pages.at(sequence.entry_k, column);
    if (!pages.exists(page)) return {kNowhere, kNowhere};
    const auto at = [&](const core::Strides& strides) {
      return page * strides.batch + (slot - column * pages.size) * strides.seqlen +
             walk_.item.head * strides.head;
    };
    return {at(p.k.strides), at(p.v.strides)};
  }

  /// A tile of keys and values; a group of copies, empty beyond the last tile.
  __device__ __forceinline__ void load(int tile, int stage, const Place& at) const {
    if (tile < end_) {
      const std::uint32_t to = ring_ + stage * kStageBytes;
      if (paged()) {
        load_placed<kChunks>(to, p.k, p.head_dim, at.k);
        load_placed<kChunksV>(to + kKeyBytes, p.v, p.head_dim_v, at.v);
      } else {
        const core::Range keys = walk_.item.tiles.from(tile);
        load_rows<kChunks>(to, p.k, p.head_dim, keys);
        load_rows<kChunksV>(to + kKeyBytes, p.v, p.head_dim_v, keys);
      }
    }
    ptx::copy_commit();
  }
  /// Rows side by side; what does not exist becomes 0.
  template <int kRowChunks>
  __device__ __forceinline__ void load_rows(std::uint32_t to, const Source& source, int dim,
                                            core::Range keys) const {
    constexpr int kUnits = kRowChunks * 8, kAtOnce = rows_at_once(kUnits);
    const int unit = lane_ % kUnits, row = lane_ / kUnits;
    const bool in_row = unit * 8 < dim;
    const auto* from =
        static_cast<const std::uint16_t*>(source.data) +
        walk_.item.sequence.key_offset(source.strides, keys.begin + row, walk_.item.head) +
        (in_row ? unit * 8 : 0);
    const int left = keys.end - keys.begin - row;
    to += place(row, unit);
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kAtOnce) {
      const bool exists = in_row && i < left;
      // A row that does not exist is not read, but its address must be one.
      ptx::copy_async((to ^ i % 8 * 16) + i * 128, exists ? from : source.data, exists);
      from += kAtOnce * source.strides.seqlen;
    }
  }
  /// The same of rows that lie anywhere: row i where lane i says.
  template <int kRowChunks>
  __device__ __forceinline__ void load_placed(std::uint32_t to, const Source& source, int dim,
                                              std::int64_t at) const {
    constexpr int kUnits = kRowChunks * 8, kAtOnce = rows_at_once(kUnits);
    const int unit = lane_ % kUnits, row = lane_ / kUnits;
    const bool in_row = unit * 8 < dim;
    to += place(row, unit);
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kAtOnce) {
      const std::int64_t row_at = __shfl_sync(~0U, at, row + i);
      const bool exists = in_row && row_at != kNowhere;
      const auto* const from = static_cast<const std::uint16_t*>(source.data) + row_at + unit * 8;
      ptx::copy_async((to ^ i % 8 * 16) + i * 128, exists ? from : source.data, exists);
    }
  }
  /// Rows of so many 16-byte units that a warp copies together.
  __device__ __forceinline__ static constexpr int rows_at_once(int units) {
    return units <= 32 ? 32 / units : 1;
  }

  // ---- a tile of keys ----

  __device__ __forceinline__ void hold_queries() {
    if constexpr (kHolds) {
#pragma unroll
      for (int i = 0; i < K.head_dim / 16; ++i) read_queries(i, held_ + 4 * i);
    }
  }
  /// The i-th 16 columns of all rows as the A operand.
  __device__ __forceinline__ void read_queries(int i, std::uint32_t* words) const {
    ptx::load_matrices(words, columns(queries_ + place(lane_ % 16, lane_ / 16), i));
  }

  __device__ __forceinline__ void attend(int tile, int stage) {
    const std::uint32_t keys = ring_ + stage * kStageBytes, values = keys + kKeyBytes;
    multiply_keys(keys);
    transform(tile);
    w_.weigh_at_once([this] {
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] *= w_.factor[i / 2 % 2];
    });
    multiply_values(values);
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(std::uint32_t keys) {
#pragma unroll
    for (float& x : w_.s) x = 0.0F;
    keys += place(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int i = 0; i < K.head_dim / 16; ++i) {
      std::uint32_t b[4], a[4];
      ptx::load_matrices(b, columns(keys, i));
      const std::uint32_t* queries = a;
      if constexpr (kHolds) {
        queries = held_ + 4 * i;
      } else {
        read_queries(i, a);
      }
      ptx::mma<kType>(w_.s, queries, b[0], b[1]);
      ptx::mma<kType>(w_.s + 4, queries, b[2], b[3]);
    }
  }

  /// Products become base-2 scores (S1), the mask last.
  __device__ __forceinline__ void transform(int tile) {
    if (p.score.capped) {
#pragma unroll
      for (float& x : w_.s) x = capped_tanh(p.score.pre, x) * p.score.post;
    } else {
#pragma unroll
      for (float& x : w_.s) x *= p.score.pre;
    }
    const core::Range keys = walk_.item.tiles.from(tile);
    const int first = keys.begin + lane_ % 4 * 2;
    if (p.extras.any()) add_row_extras(first);
    const int last = keys.begin + kTileKeys;
    if (last <= keys.end && common_.begin <= keys.begin && last <= common_.end) return;
    const core::SequenceMask mask = this->mask();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (mask.special()) {
        hide_each(mask, half, first, keys.end);
      } else {
        const core::Range seen = {mask.begin_of(query_[half]),
                                  core::min(mask.end_of(query_[half]), keys.end)};
        mask_row(w_.s, half, {seen.begin - first, seen.end - first}, -core::kInfinity);
      }
    }
  }
  /// Of the half-th row of the lane: what has holes.
  __device__ __forceinline__ void hide_each(const core::SequenceMask& mask, int half, int first,
                                            int end) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) {
      const int key = first + i / 2 * 8 + i % 2;
      float& score = w_.s[i / 2 * 4 + 2 * half + i % 2];
      if (key >= end || !mask.visible(query_[half], key)) score = -core::kInfinity;
    }
  }
  /// The lane's two rows belong to any two queries and heads.
  __device__ __forceinline__ void add_row_extras(int first_key) {
    const DecodeItem& item = walk_.item;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = core::min(row_of(half), core::max(count_ - 1, 0));
      const ScorePlace at = {item.sequence.batch,    item.head * p.group + item.rows.member_of(row),
                             query_[half],           first_key,
                             item.sequence.seqlen_q, item.sequence.seqlen_k};
      add_extras_of_row(p.extras, at, half, w_.s);
    }
  }

  /// O += P V.
  __device__ __forceinline__ void multiply_values(std::uint32_t values) {
    values += place(lane_ % 16, lane_ / 16);
#pragma unroll
    for (int i = 0; i < K.head_dim_v / 16; ++i) {
      std::uint32_t b[4];
      ptx::load_matrices_across(b, columns(values, i));
      ptx::mma<kType>(o_ + 8 * i, w_.operand, b[0], b[1]);
      ptx::mma<kType>(o_ + 8 * i + 4, w_.operand, b[2], b[3]);
    }
  }

  static constexpr bool kHolds = K.head_dim <= 128;  ///< queries in registers

  const DecodeParams& p;
  const int warp_, lane_;
  const std::uint32_t queries_;  ///< shared address
  const std::uint32_t ring_;     ///< the warp's
  float* const exchange_;        ///< in the ring's place
  DecodeWalk<K> walk_;
  Place next_ = {kNowhere, kNowhere};  ///< of the tile to be loaded next
  core::Range common_;                 ///< keys that all rows see
  int end_ = 0;                        ///< of the part's tiles
  int count_ = 0;                      ///< rows that exist
  int query_[2];                       ///< of the lane's rows
  std::uint32_t held_[kHolds ? K.head_dim / 4 : 1];
  Weights<kType, kTileKeys> w_;
  float o_[K.head_dim_v / 2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void decode(const DecodeParams& p, char* shared) {
  Decoder<K>(p, shared).run();
}

}  // namespace tessera::cuda::mma
