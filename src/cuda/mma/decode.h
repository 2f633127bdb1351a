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
  using Element = typename CachedElement<cached_size(K)>::Type;
  static constexpr int kRows = K.block_m, kWarps = decode_warps(K), kStages = decode_stages(K);
  /// Whether keys and values are of 8 bits (decode_widened.h).
  static constexpr bool kWidens = core::widens(K);
  static constexpr int kSize = cached_size(K), kUnit = 16 / kSize;  ///< elements of 16 bytes
  /// 16-byte units of a row.
  static constexpr int kUnits = K.head_dim / kUnit, kUnitsV = K.head_dim_v / kUnit,
                       kUnitsQ = K.head_dim / 8;
  static constexpr int kKeyBytes = key_bytes(K), kValueBytes = value_bytes(K);
  static constexpr int kStageBytes = stage_bytes(K), kQueryBytes = chunk_bytes(K.head_dim * 2);
  static constexpr int kPrefetched = 2;  ///< tiles of a warp
  /// Tiles that a warp has under way; beside them its output has room.
  static constexpr int kAhead = kStages - output_stages(K);
  static_assert(kAhead >= 2 && kRows == kBlockRows);
  static_assert((kUnits & (kUnits - 1)) == 0 && (kUnitsV & (kUnitsV - 1)) == 0);

  /// Shared memory, from its first multiple of 128 bytes.
  struct Shared {
    char queries[2][kQueryBytes];  ///< of a piece and the next
    char ring[kWarps][kStages][kStageBytes];
    DecodePiece pieces[kWarps][2];
    float query_factors[kWidens ? kRows : 1];  ///< of products of queries as they lie here
    DecodeExchange<K> exchange;
    DecodeSearch<K> search;
  };
  static_assert(sizeof(Shared) + 128 <= decode_bytes(K));

 public:
  __device__ __forceinline__ Decoder(const DecodeParams& params, char* memory)
      : p(params),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        shared_(*reinterpret_cast<Shared*>(memory + (128 - ptx::shared_address(memory) % 128))),
        walk_(params, shared_.search),
        policy_(ptx::cache_policy(params.parts.blocks == 1)),
        w_(1.0F) {}

  /// What is long is here once: code that a launch runs for the first time comes from memory. The
  /// loop over tiles is left to find the next piece, for which loads go on, and entered again.
  __device__ __forceinline__ void run() {
    int owed = kAhead;  // tiles to be loaded before one is multiplied
#pragma unroll 1
    for (;;) {
      if (!loading_ && !ahead_) advance();
#pragma unroll 1
      for (; owed > 0; --owed) load_next();
#pragma unroll 1
      while (tile_ < tiles_end_) {
        ptx::copy_wait<kAhead - 1>();
        __syncwarp();
        attend();
        __syncwarp();
        tile_ += kWarps;
        --under_way_;
        stage_ = after(stage_);
        load_next();
        if (!loading_ && !ahead_) break;
      }
      if (tile_ < tiles_end_ || !ahead_) continue;
      const DecodeResults<K> results(p, walk_, piece(), shared_.exchange);
      if (attending_) {
        // Of the stages that hold no tile, the last ones before the next.
        results.leave(w_, o_, value_factor(), [this](int i) {
          const int stage = stage_ - 1 - i;
          return reinterpret_cast<float*>(shared_.ring[warp_][stage < 0 ? stage + kStages : stage]);
        });
        meet_queries();  // and all outputs
        results.finish();
      }
      if (!more_) return;
      turn();
      owed = under_way_ < kAhead ? kAhead : 0;
    }
  }

 private:
  __device__ __forceinline__ DecodePiece& piece() const { return shared_.pieces[warp_][now_]; }
  __device__ __forceinline__ DecodePiece& next_piece() const {
    return shared_.pieces[warp_][1 - now_];
  }
  __device__ __forceinline__ static int after(int stage) {
    return stage + 1 == kStages ? 0 : stage + 1;
  }
  __device__ __forceinline__ core::SequenceMask mask() const {
    return p.mask.of(p.sequences, piece().sequence);
  }
  __device__ __forceinline__ bool paged() const { return p.cache.pages.table != nullptr; }

  // ---- pieces ----

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

  /// The next piece becomes the piece; nothing of it has been multiplied yet.
  __device__ __forceinline__ void turn() {
    now_ = 1 - now_;
    ahead_ = false;
    tile_ = piece().tiles.begin + warp_;
    tiles_end_ = piece().tiles.end;
    const int last = core::max(piece().rows - 1, 0);
    for (int half = 0; half < 2; ++half) {
      query_[half] = mma::row_of(piece(), p.group, core::min(row_of(half), last)).query;
    }
    common_ = mask().common_keys(
        {mma::row_of(piece(), p.group, 0).query, mma::row_of(piece(), p.group, last).query + 1});
    w_.reset();
#pragma unroll
    for (float& x : o_) x = 0.0F;
    // Nobody reads outputs of the piece before any more; of the first one queries are there.
    if (attending_) {
      __syncthreads();
    } else {
      meet_queries();
    }
    attending_ = true;
    if constexpr (kWidens) widen();
    hold_queries();
  }
  /// The piece's queries become fp16, and its scales are the lane's.
  __device__ __forceinline__ void widen() {
#pragma unroll 1
    for (int row = warp_; row < piece().rows; row += kWarps) {
      const float factor = widen_queries<K.head_dim>(p.dtype, [&](int word) {
        char* const queries = shared_.queries[now_];
        return reinterpret_cast<std::uint32_t*>(queries + place(row, word / 4)) + word % 4;
      });
      if (lane_ == 0) shared_.query_factors[row] = factor;
    }
    __syncthreads();
    value_factor_ = scales_[1];
    for (int half = 0; half < 2; ++half) {
      const int row = core::min(row_of(half), core::max(piece().rows - 1, 0));
      query_factor_[half] = shared_.query_factors[row] * scales_[0];
    }
    value_scales_.reset();
  }

  // ---- loads ----

  /// Where a lane's key lies: lanes 0 to 15 have the keys of a tile, the others of the warp's next.
  struct PageOfKey {
    int slot = 0, number = 0;
    std::int64_t wide = 0;  ///< instead of number
  };

  /// A group of copies: the next tile's, if there is one and a stage for it.
  __device__ __forceinline__ void load_next() {
    if (loading_ && under_way_ < kAhead) {
      const DecodePiece& from = loaded_piece();
      load(from, shared_.ring[warp_][to_]);
      to_ = after(to_);
      ++under_way_;
      next_ += kWarps;
      loading_ = next_ < from.tiles.end;
      half_ = kTileKeys - half_;
      if (loading_ && half_ == 0) look_up(from);
    }
    ptx::copy_commit();
  }
  /// Loads go on with the next piece, if there is one.
  __device__ __forceinline__ void advance() {
    ahead_ = true;
    more_ = walk_.next(piece(), next_piece(), [this](const DecodePiece& of) { prefetch(of); });
    if (!more_) return;
    load_queries(next_piece());
    if constexpr (kWidens) {
      scales_[0] = scale_of(p.k_scale, next_piece());
      scales_[1] = scale_of(p.v_scale, next_piece());
    }
    next_ = next_piece().tiles.begin + warp_;
    loading_ = next_ < next_piece().tiles.end;
    half_ = 0;
    if (loading_) look_up(next_piece());
  }
  /// Of the tile next_.
  __device__ __forceinline__ const DecodePiece& loaded_piece() const {
    return shared_.pieces[warp_][ahead_ ? 1 - now_ : now_];
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

  /// What all of a piece's keys or values are multiplied by; 1 where each has a scale of its own.
  __device__ __forceinline__ float scale_of(const core::Scales& scales,
                                            const DecodePiece& of) const {
    return scales.of_slots() ? 1.0F : *scales.of(of.sequence, of.head);
  }

  /// Queries of all rows, and zeros: the warp's share of a piece's.
  __device__ __forceinline__ void load_queries(const DecodePiece& of) const {
    const std::uint32_t to =
        ptx::shared_address(shared_.queries[&of == &piece() ? now_ : 1 - now_]);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kUnitsQ; i += kWarps * 32) {
      const int row = i / kUnitsQ, unit = i % kUnitsQ;
      const bool exists = row < of.rows && unit * 8 < p.head_dim;
      const DecodeRow at = mma::row_of(of, p.group, row);
      const std::uint16_t* const from = query(of, at) + unit * 8;
      ptx::copy_async(to + place(row, unit), exists ? from : p.q.data, exists);
    }
  }
  /// A row of q.
  __device__ __forceinline__ const std::uint16_t* query(const DecodePiece& of,
                                                        const DecodeRow& row) const {
    return static_cast<const std::uint16_t*>(p.q.data) +
           of.sequence.query_offset(p.q.strides, row.query, of.head * p.group.value() + row.member);
  }

  /// With pages: in which one lies the lane's key of the next two tiles. It takes as long to come
  /// as keys do, so nothing is made of it before they are asked for.
  __device__ __forceinline__ void look_up(const DecodePiece& from) {
    if (!paged()) return;
    static_assert(kTileKeys == 16);
    const core::Range keys = from.keys.from(next_ + lane_ / kTileKeys * kWarps);
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

  /// Asks the second-level cache for what may become the warp's first tiles, and for the queries.
  __device__ __forceinline__ void prefetch(const DecodePiece& of) const {
    if (warp_ == 0 && lane_ < of.rows) {
      const DecodeRow at = mma::row_of(of, p.group, lane_);
      ptx::prefetch(query(of, at), static_cast<std::uint32_t>(p.head_dim) * 2, policy_);
    }
    const bool value = lane_ >= kTileKeys;
    const Source& source = value ? p.v : p.k;
    const auto* const head =
        static_cast<const Element*>(source.data) + of.head * source.strides.head;
    int tile = of.tiles.begin + warp_;
#pragma unroll 1
    for (int i = 0; i < kPrefetched && tile < of.tiles.end; ++i, tile += kWarps) {
      const core::Range keys = of.keys.from(tile);
      const int key = keys.begin + lane_ % kTileKeys;
      if (key >= keys.end) continue;
      int slot = of.sequence.first_k + key;
      std::int64_t entry = of.sequence.entry_k;
      if (paged()) {
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
      ptx::prefetch(head + entry * source.strides.batch + slot * source.strides.seqlen,
                    row_bytes(value ? p.head_dim_v : p.head_dim), policy_);
    }
  }
  __device__ __forceinline__ static std::uint32_t row_bytes(int dim) {
    return static_cast<std::uint32_t>(dim) * kSize;
  }

  /// Keys and values of the next tile.
  __device__ __forceinline__ void load(const DecodePiece& from, char* stage) const {
    const std::uint32_t to = ptx::shared_address(stage);
    const core::Range keys = from.keys.from(next_);
    int left = keys.end - keys.begin, slot = from.sequence.first_k + keys.begin;
    std::int64_t entry = from.sequence.entry_k;
    if (paged()) {
      const core::Pages& pages = p.cache.pages;
      const std::int64_t page = pages.ids == PageIds::i32 ? page_.number : page_.wide;
      slot = __shfl_sync(~0U, page_.slot, half_);
      if (slot + kTileKeys > pages.size) {
        const bool exists = lane_ % kTileKeys < left && pages.exists(page);
        const unsigned rows = __ballot_sync(~0U, exists) >> half_;
        const auto at = [&](const Source& source) {
          const core::Strides& strides = source.strides;
          const std::int64_t offset =
              page * strides.batch + page_.slot * strides.seqlen + from.head * strides.head;
          return static_cast<const Element*>(source.data) + (exists ? offset : 0);
        };
        load_placed<kUnits>(to, at(p.k), p.head_dim, rows);
        load_placed<kUnitsV>(to + kKeyBytes, at(p.v), p.head_dim_v, rows);
        if constexpr (kWidens) {
          const int key = lane_ % kTileKeys;
          load_scale(to, from, __shfl_sync(~0U, page, half_ + key),
                     __shfl_sync(~0U, page_.slot, half_ + key), (rows >> key & 1) != 0);
        }
        return;
      }
      entry = __shfl_sync(~0U, page, half_);
      if (!pages.exists(entry)) left = 0;
    }
    const auto at = [&](const Source& source) {
      const core::Strides& strides = source.strides;
      return static_cast<const Element*>(source.data) + entry * strides.batch +
             slot * strides.seqlen + from.head * strides.head;
    };
    load_rows<kUnits>(to, p.k, at(p.k), p.head_dim, left);
    load_rows<kUnitsV>(to + kKeyBytes, p.v, at(p.v), p.head_dim_v, left);
    if constexpr (kWidens) {
      const int key = lane_ % kTileKeys;
      load_scale(to, from, entry, slot + key, key < left);
    }
  }
  /// By token: lanes 0 to 15 load the scales of a tile's keys, the others those of its values.
  __device__ __forceinline__ void load_scale(std::uint32_t to, const DecodePiece& from,
                                             std::int64_t entry, int slot, bool exists) const {
    const core::Scales& scales = lane_ < kTileKeys ? p.k_scale : p.v_scale;
    if (!scales.of_slots()) return;
    const std::int64_t at = entry * scales.stride_batch + slot * scales.stride_seqlen +
                            from.head * scales.stride_head;
    ptx::copy_async_word(to + kKeyBytes + kValueBytes + lane_ * 4, scales.data + (exists ? at : 0),
                         exists);
  }

  /// Rows side by side; what does not exist becomes 0.
  template <int kRowUnits>
  __device__ __forceinline__ void load_rows(std::uint32_t to, const Source& source,
                                            const Element* from, int dim, int left) const {
    constexpr int kAtOnce = rows_at_once(kRowUnits);
    const int unit = lane_ % kRowUnits, row = lane_ / kRowUnits;
    const bool in_row = unit * kUnit < dim;
    from += row * source.strides.seqlen + unit * kUnit;
    to += place(row, unit);
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kAtOnce) {
      const bool exists = in_row && row + i < left;
      // A row that does not exist is not read, but its address must be one.
      ptx::copy_async((to ^ i % 8 * 16) + i * 128, exists ? from : source.data, exists, policy_);
      from += kAtOnce * source.strides.seqlen;
    }
  }
  /// The same of rows that lie anywhere: row i where lane half_ + i says, if bit i of `rows` says
  /// that it exists.
  template <int kRowUnits>
  __device__ __forceinline__ void load_placed(std::uint32_t to, const Element* from, int dim,
                                              unsigned rows) const {
    constexpr int kAtOnce = rows_at_once(kRowUnits);
    const int unit = lane_ % kRowUnits, row = lane_ / kRowUnits;
    // A row that does not exist is not read, but its address must be one.
    const int column = unit * kUnit < dim ? unit * kUnit : 0;
    rows = unit * kUnit < dim ? rows >> row : 0;
    to += place(row, unit);
#pragma unroll
    for (int i = 0; i < kTileKeys; i += kAtOnce) {
      const auto* const row_from = reinterpret_cast<const Element*>(
          __shfl_sync(~0U, reinterpret_cast<std::uint64_t>(from), half_ + row + i));
      ptx::copy_async((to ^ i % 8 * 16) + i * 128, row_from + column, (rows >> i & 1) != 0,
                      policy_);
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

  __device__ __forceinline__ void attend() {
    const std::uint32_t keys = ptx::shared_address(shared_.ring[warp_][stage_]);
    const std::uint32_t values = keys + kKeyBytes;
    multiply_keys(keys);
    transform(tile_);
    const auto raise = [this] {
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] *= w_.factor[i / 2 % 2];
    };
    if constexpr (kWidens) {
      float scales[4] = {1.0F, 1.0F, 1.0F, 1.0F};
      if (p.v_scale.of_slots()) {
        tile_scales(1, scales);
        value_scales_.take(scales, [this](float factor) {
#pragma unroll
          for (float& x : o_) x *= factor;
        });
      }
      w_.weigh_at_once(
          raise, [&](float weight, int i) { return weight * scales[i / 4 * 2 + i % 2]; });
    } else {
      w_.weigh_at_once(raise);
    }
    multiply_values(values);
  }
  /// By token: of the keys (0) or values (1) that the lane has scores of.
  __device__ __forceinline__ void tile_scales(int which, float (&scales)[4]) const {
    const auto* const all = reinterpret_cast<const float*>(shared_.ring[warp_][stage_] + kKeyBytes +
                                                           kValueBytes);
    const float* const mine = all + which * kTileKeys + lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = mine[i / 2 * 8 + i % 2];
  }
  /// What the piece's outputs lack.
  __device__ __forceinline__ float value_factor() const {
    if constexpr (!kWidens) return 1.0F;
    return p.v_scale.of_slots() ? value_scales_.top() : value_factor_;
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(std::uint32_t keys) {
#pragma unroll
    for (float& x : w_.s) x = 0.0F;
    keys += place(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int i = 0; i < kUnits / 2; ++i) {
      std::uint32_t b[4];
      ptx::load_matrices(b, columns(keys, i));
      if constexpr (kWidens) {
        // A unit of a key is 16 columns.
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          std::uint32_t low[2], high[2];
          ptx::widen_four<K.cached>(b[j], low[0], high[0]);
          ptx::widen_four<K.cached>(b[2 + j], low[1], high[1]);
          multiply_columns(2 * i + j, low[0], high[0], low[1], high[1]);
        }
      } else {
        multiply_columns(i, b[0], b[1], b[2], b[3]);
      }
    }
  }
  /// The i-th 16 columns of two times 8 keys.
  __device__ __forceinline__ void multiply_columns(int i, std::uint32_t first_low,
                                                   std::uint32_t first_high,
                                                   std::uint32_t second_low,
                                                   std::uint32_t second_high) {
    std::uint32_t a[4];
    const std::uint32_t* queries = a;
    if constexpr (kHolds) {
      queries = held_ + 4 * i;
    } else {
      read_queries(i, a);
    }
    ptx::mma<kType>(w_.s, queries, first_low, first_high);
    ptx::mma<kType>(w_.s + 4, queries, second_low, second_high);
  }

  /// Products become base-2 scores (S1), the mask last.
  __device__ __forceinline__ void transform(int tile) {
    if constexpr (kWidens) apply_scales();
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
        hide_each(mask.of(query_[half]), half, first, keys.end);
      } else {
        const core::Range seen = {mask.begin_of(query_[half]),
                                  core::min(mask.end_of(query_[half]), keys.end)};
        mask_row(w_.s, half, {seen.begin - first, seen.end - first}, -core::kInfinity);
      }
    }
  }
  /// Products become q . k.
  __device__ __forceinline__ void apply_scales() {
    float scales[4] = {1.0F, 1.0F, 1.0F, 1.0F};
    if (p.k_scale.of_slots()) tile_scales(0, scales);
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      w_.s[i] *= query_factor_[i / 2 % 2] * scales[i / 4 * 2 + i % 2];
    }
  }
  /// Of the half-th row of the lane: what has holes.
  __device__ __forceinline__ void hide_each(const core::QueryMask& seen, int half, int first,
                                            int end) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) {
      const int key = first + i / 2 * 8 + i % 2;
      float& score = w_.s[i / 2 * 4 + 2 * half + i % 2];
      if (key >= end || !seen.visible(key)) score = -core::kInfinity;
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
    for (int i = 0; i < kUnitsV / 2; ++i) {
      std::uint32_t b[4];
      ptx::load_matrices_across(b, columns(values, i));
      if constexpr (kWidens) {
        // Words are 2 columns of 2 keys; of 16 columns the even ones are multiplied, then the odd.
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          std::uint32_t low, high;
          float* const o = o_ + 8 * (2 * i + j);
          ptx::widen_four<K.cached>(ptx::permute<0x6420>(b[2 * j], b[2 * j + 1]), low, high);
          ptx::mma<kType>(o, w_.operand, low, high);
          ptx::widen_four<K.cached>(ptx::permute<0x7531>(b[2 * j], b[2 * j + 1]), low, high);
          ptx::mma<kType>(o + 4, w_.operand, low, high);
        }
      } else {
        ptx::mma<kType>(o_ + 8 * i, w_.operand, b[0], b[1]);
        ptx::mma<kType>(o_ + 8 * i + 4, w_.operand, b[2], b[3]);
      }
    }
  }

  static constexpr bool kHolds = K.head_dim <= 128;  ///< queries in registers

  const DecodeParams& p;
  const int warp_, lane_;
  Shared& shared_;
  DecodeWalk<K> walk_;
  const ptx::CachePolicy policy_;  ///< of keys, which are read once, but for many rows
  int now_ = 0;                    ///< of the warp's two pieces
  bool attending_ = false;         ///< it is one: the span has been found
  bool ahead_ = false;             ///< loads are in the next piece
  bool more_ = true;               ///< there is one, where they are
  bool loading_ = false;           ///< tile next_ exists
  int next_ = 0;                   ///< tile to be loaded
  PageOfKey page_;                 ///< of the lane's key
  int half_ = 0;                   ///< the first of the lanes that have the keys of tile next_
  int tile_ = 0, tiles_end_ = 0;   ///< to be multiplied
  int under_way_ = 0;              ///< tiles loaded, but not multiplied
  int stage_ = 0, to_ = 0;         ///< of the ring: of the first of them, of the next
  core::Range common_;             ///< keys that all rows see
  int query_[2];                   ///< of the lane's rows
  std::uint32_t held_[kHolds ? K.head_dim / 4 : 1];
  DecodeWeights<K> w_;
  float o_[K.head_dim_v / 2];
  // Rows that widen:
  float scales_[2];  ///< of keys and values where loads are
  float value_factor_;     ///< the second, of the piece
  float query_factor_[2];  ///< of the lane's rows, times the first
  ValueScales value_scales_;
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void decode(const DecodeParams& p, char* shared) {
  Decoder<K>(p, shared).run();
}

}  // namespace tessera::cuda::mma
