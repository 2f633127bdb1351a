// Decoding: few query rows against many keys, at the speed of memory (FlashDecoding: Dao, Haziza,
// Massa, Sizov 2023). All query heads of a group and their queries share one axis of rows
// (core::Rows), cut into blocks of 16, so with up to 16 rows a key/value head is read once. Blocks
// of threads stay on their multiprocessors and take equal spans of all keys (decode_walk.h), piece
// after piece. Their warps take tiles of 16 keys in turn, each with a ring, a softmax and an output
// of its own, and meet only at the end of a piece (decode_results.h). Loads are ahead of the
// products, in the next piece, too.
//
// Any GPU with cp.async, ldmatrix and mma.sync.
#pragma once

#include "core/storage.h"
#include "cuda/mma/decode_results.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/extras.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class Decoder {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kRows = K.block_m, kWarps = decode_warps(K), kStages = decode_stages(K);
  static constexpr int kChunks = core::ceil_div(K.head_dim, kColumns);
  static constexpr int kChunksV = core::ceil_div(K.head_dim_v, kColumns);
  static constexpr int kKeyBytes = chunk_bytes(K.head_dim), kValueBytes = chunk_bytes(K.head_dim_v);
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static_assert(kTileKeys * 8 % 32 == 0 && (kChunks & (kChunks - 1)) == 0);
  static_assert(kRows * K.head_dim_v * 4 <= kStageBytes && kRows == kBlockRows);

  /// Shared memory, from its first multiple of 128 bytes.
  struct Shared {
    char queries[2][kKeyBytes];  ///< of a piece and the next
    char ring[kWarps][kStages][kStageBytes];
    DecodePiece pieces[kWarps][2];
    DecodeExchange<K> exchange;
  };
  static_assert(sizeof(Shared) + 128 <= decode_bytes(K));

 public:
  __device__ __forceinline__ Decoder(const DecodeParams& params, char* memory)
      : p(params),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        shared_(*reinterpret_cast<Shared*>(memory + (128 - ptx::shared_address(memory) % 128))),
        walk_(params),
        w_(1.0F) {}

  __device__ __forceinline__ void run() {
    ptx::wait_for_grids();
    ptx::launch_dependents();
    if (!walk_.first(piece())) return;
    load_queries(piece());
    begin_loading(piece());
    fill();
    meet_queries();
#pragma unroll 1
    for (bool more = true; more;) {
      attend_piece();
      if (!ahead_) advance();
      more = more_;
      const DecodeResults<K> results(p, walk_, piece(), shared_.exchange);
      results.leave(w_, o_, reinterpret_cast<float*>(shared_.ring[warp_][before(stage_)]));
      meet_queries();  // and all outputs
      results.merge_warps();
      __syncthreads();
      results.announce();
      if (results.merges_parts()) results.merge_parts(reinterpret_cast<float*>(shared_.ring));
      turn();
    }
  }

 private:
  __device__ __forceinline__ DecodePiece& piece() const { return shared_.pieces[warp_][now_]; }
  __device__ __forceinline__ DecodePiece& next_piece() const {
    return shared_.pieces[warp_][1 - now_];
  }
  __device__ __forceinline__ static int before(int stage) {
    return stage == 0 ? kStages - 1 : stage - 1;
  }
  __device__ __forceinline__ static int after(int stage) {
    return stage + 1 == kStages ? 0 : stage + 1;
  }
  __device__ __forceinline__ core::SequenceMask mask() const {
    return p.mask.of(p.sequences, piece().sequence);
  }
  __device__ __forceinline__ bool paged() const { return p.cache.pages.table != nullptr; }

  // ---- pieces ----

  /// Output and state of the warp's keys in a piece.
  __device__ __forceinline__ void attend_piece() {
    hold_queries();
    const int last = core::max(piece().rows - 1, 0);
    for (int half = 0; half < 2; ++half) {
      query_[half] = mma::row_of(piece(), p.group, core::min(row_of(half), last)).query;
    }
    common_ = mask().common_keys(
        {mma::row_of(piece(), p.group, 0).query, mma::row_of(piece(), p.group, last).query + 1});
    w_.reset();
#pragma unroll
    for (float& x : o_) x = 0.0F;
    const int end = piece().tiles.end;
#pragma unroll 1
    for (int tile = piece().tiles.begin + warp_; tile < end; tile += kWarps) {
      ptx::copy_wait<kStages - 2>();
      __syncwarp();
      attend(tile, stage_);
      __syncwarp();
      --under_way_;
      stage_ = after(stage_);
      load_next();
    }
  }

  /// All warps have their parts of the queries that were asked for last.
  __device__ __forceinline__ void meet_queries() const {
    // They were in the group of the next tile, or in one before it.
    if (under_way_ == kStages - 1) {
      ptx::copy_wait<kStages - 2>();
    } else {
      ptx::copy_commit();
      ptx::copy_wait<0>();
    }
    __syncthreads();
  }

  /// The next piece becomes the piece.
  __device__ __forceinline__ void turn() {
    now_ = 1 - now_;
    ahead_ = false;
    if (!more_) return;
    if (!loading_ && !keeps_ring()) advance();
    if (under_way_ < kStages - 1) fill();
  }

  // ---- loads ----

  /// As many tiles as the ring takes, each in a group of its own.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load_next();
  }
  /// A group of copies: the next tile's, if there is one and a stage for it.
  __device__ __forceinline__ void load_next() {
    if (loading_ && under_way_ < kStages - 1) {
      const DecodePiece& from = ahead_ ? next_piece() : piece();
      load(from, shared_.ring[warp_][to_]);
      to_ = after(to_);
      ++under_way_;
      next_ += kWarps;
      if (next_ < from.tiles.end) {
        look_up(from);
      } else {
        loading_ = false;
        if (!ahead_ && !keeps_ring()) advance();
      }
    }
    ptx::copy_commit();
  }
  /// Does the piece end with a merge of parts that takes the ring? A warp may have no tile of it.
  __device__ __forceinline__ bool keeps_ring() const {
    return p.parts.by_unit && piece().item.units > 1 && walk_.last_of_item(piece());
  }
  /// Loads go on with the next piece, if there is one.
  __device__ __forceinline__ void advance() {
    ahead_ = true;
    more_ = walk_.next(piece(), next_piece());
    if (!more_) return;
    load_queries(next_piece());
    begin_loading(next_piece());
  }
  __device__ __forceinline__ void begin_loading(const DecodePiece& from) {
    next_ = from.tiles.begin + warp_;
    loading_ = next_ < from.tiles.end;
    if (loading_) look_up(from);
  }

  /// Of the block, the lane's half-th row (of two).
  __device__ __forceinline__ int row_of(int half) const { return lane_ / 4 + 8 * half; }

  /// Shared address of a 16-byte unit of a row, in chunks of 64 columns, swizzled.
  __device__ __forceinline__ static std::uint32_t place(int row, int unit) {
    return unit / 8 * (kTileKeys * 128) + row * 128 + (unit % 8 ^ row % 8) * 16;
  }
  /// Where the i-th two units after those at `first` are, a multiple of two units from a row's
  /// start.
  __device__ __forceinline__ static std::uint32_t columns(std::uint32_t first, int i) {
    return (first ^ i % 4 * 32) + i / 4 * (kTileKeys * 128);
  }

  /// Queries of all rows, and zeros: the warp's share of a piece's.
  __device__ __forceinline__ void load_queries(const DecodePiece& of) const {
    constexpr int kUnits = kChunks * 8;
    const std::uint32_t to =
        ptx::shared_address(shared_.queries[&of == &piece() ? now_ : 1 - now_]);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kUnits; i += kWarps * 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const bool exists = row < of.rows && unit * 8 < p.head_dim;
      const DecodeRow at = mma::row_of(of, p.group, row);
      const auto* const from =
          static_cast<const std::uint16_t*>(p.q.data) +
          of.sequence.query_offset(p.q.strides, at.query, of.head * p.group.value() + at.member) +
          unit * 8;
      ptx::copy_async(to + place(row, unit), exists ? from : p.q.data, exists);
    }
  }

  /// With pages: in which one lies key lane % 16 of the tile to be loaded next. It takes as long to
  /// come as keys do, so nothing is made of it before they are asked for.
  __device__ __forceinline__ void look_up(const DecodePiece& from) {
    if (!paged()) return;
    const core::Range keys = from.keys.from(next_);
    const core::Pages& pages = p.cache.pages;
    const int slot =
        from.sequence.first_k + core::min(keys.begin + lane_ % kTileKeys, keys.end - 1);
    const core::Pages::Place place = pages.place(slot);
    in_page_ = place.slot;
    const std::int64_t at = from.sequence.entry_k * pages.stride + place.column;
    if (pages.ids == PageIds::i32) {
      page_ = static_cast<const std::int32_t*>(pages.table)[at];
    } else {
      wide_page_ = static_cast<const std::int64_t*>(pages.table)[at];
    }
  }

  /// Keys and values of the next tile.
  __device__ __forceinline__ void load(const DecodePiece& from, char* stage) const {
    const std::uint32_t to = ptx::shared_address(stage);
    const core::Range keys = from.keys.from(next_);
    if (!paged()) {
      load_rows<kChunks>(to, p.k, p.head_dim, from, keys);
      load_rows<kChunksV>(to + kKeyBytes, p.v, p.head_dim_v, from, keys);
      return;
    }
    const core::Pages& pages = p.cache.pages;
    const std::int64_t page = pages.ids == PageIds::i32 ? page_ : wide_page_;
    const bool exists = keys.begin + lane_ % kTileKeys < keys.end && pages.exists(page);
    const auto at = [&](const core::Strides& strides) {
      return exists ? page * strides.batch + in_page_ * strides.seqlen + from.head * strides.head
                    : kNowhere;
    };
    load_placed<kChunks>(to, p.k, p.head_dim, at(p.k.strides));
    load_placed<kChunksV>(to + kKeyBytes, p.v, p.head_dim_v, at(p.v.strides));
  }
  /// Where the rows of a key lie that does not exist.
  static constexpr std::int64_t kNowhere = -0x7FFF'FFFF'FFFF'FFFF;

  /// Rows side by side; what does not exist becomes 0.
  template <int kRowChunks>
  __device__ __forceinline__ void load_rows(std::uint32_t to, const Source& source, int dim,
                                            const DecodePiece& of, core::Range keys) const {
    constexpr int kUnits = kRowChunks * 8, kAtOnce = rows_at_once(kUnits);
    const int unit = lane_ % kUnits, row = lane_ / kUnits;
    const bool in_row = unit * 8 < dim;
    const auto* from = static_cast<const std::uint16_t*>(source.data) +
                       of.sequence.key_offset(source.strides, keys.begin + row, of.head) +
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
    ptx::load_matrices(
        words,
        columns(ptx::shared_address(shared_.queries[now_]) + place(lane_ % 16, lane_ / 16), i));
  }

  __device__ __forceinline__ void attend(int tile, int stage) {
    const std::uint32_t keys = ptx::shared_address(shared_.ring[warp_][stage]);
    const std::uint32_t values = keys + kKeyBytes;
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
    const core::Range keys = piece().keys.from(tile);
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
    const core::Sequence& sequence = piece().sequence;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = core::min(row_of(half), core::max(piece().rows - 1, 0));
      const ScorePlace at = {
          sequence.batch,
          piece().head * p.group.value() + mma::row_of(piece(), p.group, row).member,
          query_[half],
          first_key,
          sequence.seqlen_q,
          sequence.seqlen_k};
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
  Shared& shared_;
  DecodeWalk walk_;
  int now_ = 0;          ///< of the warp's two pieces
  bool ahead_ = false;   ///< loads are in the next piece
  bool more_ = true;     ///< there is one, where they are
  bool loading_ = true;  ///< tile next_ exists
  int next_ = 0;         ///< tile to be loaded
  int page_ = 0, in_page_ = 0;
  std::int64_t wide_page_ = 0;
  int under_way_ = 0;       ///< tiles loaded, but not multiplied
  int stage_ = 0, to_ = 0;  ///< of the ring: of the first of them, of the next
  core::Range common_;      ///< keys that all rows see
  int query_[2];            ///< of the lane's rows
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
