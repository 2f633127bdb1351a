// Decoding: few query rows against many keys, at the speed of memory (FlashDecoding: Dao, Haziza,
// Massa, Sizov 2023). All query heads of a group and their queries share one axis of rows
// (core::Rows), cut into blocks of 16, so with up to 16 rows a key/value head is read once. Blocks
// of threads stay on their multiprocessors and take equal spans of all keys (decode_walk.h), piece
// after piece. Their warps take tiles of 16 keys in turn, each with a ring, a softmax and an output
// of its own, and meet only at the end of a piece (decode_results.h). Loads are ahead of the
// products (decode_loads.h), in the next piece, too.
//
// Where outputs of 16 rows are wider than the registers of a warp, two are a team
// (core::mma_parts), which takes tiles as a warp does elsewhere. Each has half of the columns, of
// everything, and a ring for them; the only thing it tells the other is what its columns add to
// scores.
//
// Any GPU with cp.async, ldmatrix and mma.sync; rows whose warps multiply together need wgmma.
#pragma once

#include "core/storage.h"
#include "cuda/mma/decode_loads.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/tile/extras.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class Decoder {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kWarps = decode_warps(K), kTeams = decode_teams(K), kStages = K.stages;
  static constexpr int kParts = core::mma_parts(K);  ///< warps of a team
  static constexpr int kAhead = DecodeLoads<K>::kAhead;
  /// Whether keys and values are of 8 bits (decode_widened.h).
  static constexpr bool kWidens = core::widens(K);
  static constexpr int kUnit = 16 / cached_size(K);  ///< elements of 16 bytes
  /// Of the warp, and their 16-byte units.
  static constexpr int kColumns = decode_columns(K), kColumnsV = decode_value_columns(K);
  static constexpr int kUnits = kColumns / kUnit, kUnitsV = kColumnsV / kUnit;
  static constexpr int kAlignment = ring_alignment(K);
  static constexpr int kChunkRows = DecodeRing<K>::kChunkRows, kValues = DecodeRing<K>::kValues;
  static_assert(K.block_m == kWarpRows || (K.prefixes && K.block_m == kWarps * kWarpRows));

 public:
  __device__ __forceinline__ Decoder(const DecodeParams& params, char* memory)
      : p(params),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        shared_(*reinterpret_cast<DecodeShared<K>*>(
            memory + (kAlignment - ptx::shared_address(memory) % kAlignment))),
        loads_(params, shared_),
        has_extras_(params.extras.any()),
        w_(1.0F) {}

  /// What is long is here once: code that a launch runs for the first time comes from memory. The
  /// loop over tiles is left to find the next piece, for which loads go on, and entered again.
  __device__ __forceinline__ void run() {
    int owed = kAhead;  // tiles to be loaded before one is multiplied
#pragma unroll 1
    for (;;) {
      if (loads_.done_with_piece()) loads_.advance();
#pragma unroll 1
      for (; owed > 0; --owed) loads_.next();
#pragma unroll 1
      while (tile_ < tiles_end_) {
        ptx::copy_wait<kAhead - 1>();
        meet_tile();
        attend_step();
        tile_ += kTeams;
        stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
        if constexpr (kLoads == Loads::last) {
          __syncwarp();
          load_next();
        }
        if (loads_.done_with_piece()) break;
      }
      if (tile_ < tiles_end_ || !loads_.ahead()) continue;
      const DecodeResults<K> results(p, loads_.walk(), piece(), shared_.exchange);
      if (attending_) {
        leave(results);
        loads_.meet_queries();  // and all outputs
        if (!leaves_rows()) results.finish();
      }
      if (!loads_.more()) break;
      turn();
      owed = loads_.owed();
    }
    if constexpr (K.prefixes) join();
  }

 private:
  __device__ __forceinline__ const DecodePiece<K>& piece() const { return loads_.piece(); }
  __device__ __forceinline__ core::SequenceMask mask() const {
    return mask_of<K>(p, piece().sequence, piece());
  }
  __device__ __forceinline__ int team() const { return warp_ / kParts; }
  /// Is the piece one of a prefix, of which every warp has rows of its own?
  __device__ __forceinline__ bool leaves_rows() const {
    if constexpr (together(K)) return attending_ && spreads_ && piece().prefix != 0;
    return false;
  }
  __device__ __forceinline__ void leave(const DecodeResults<K>& results) const {
    if constexpr (together(K)) {
      if (leaves_rows()) {
        results.leave_rows(w_, o_);
        return;
      }
      __syncthreads();
    } else {
      __syncwarp();
    }
    // Nobody reads tiles any more where outputs go, nor sums.
    if constexpr (kParts > 1) meet_team();
    // Of the stages that hold no tile, the last ones before the next.
    results.leave(w_, o_, value_factor(), [this](int i) {
      const int stage = stage_ - 1 - i;
      return reinterpret_cast<float*>(shared_.ring.at(warp_, stage < 0 ? stage + kStages : stage));
    });
  }
  /// Of the block, the lane's half-th row (of two).
  __device__ __forceinline__ int row_of(int half) const {
    return lane_ / 4 + 8 * half + (spreads_ ? warp_ * kWarpRows : 0);
  }
  /// Where the i-th two units after those at `first` are, a multiple of two units from a row's
  /// start.
  template <int kRows = kTileKeys>
  __device__ __forceinline__ static std::uint32_t columns(std::uint32_t first, int i) {
    return (first ^ i % 4 * 32) + i / 4 * (kRows * kChunkBytes);
  }

  // ---- pieces ----

  /// The next piece becomes the piece; nothing of it has been multiplied yet.
  __device__ __forceinline__ void turn() {
    loads_.turn();
    spreads_ = spreads_rows<K>(piece());
    tile_ = piece().tiles.begin + (together(K) ? 0 : team());
    tiles_end_ = piece().tiles.end;
    const int last = core::max(piece().rows - 1, 0);
    for (int half = 0; half < 2; ++half) {
      query_[half] = mma::row_of<K>(piece(), p.group, core::min(row_of(half), last)).query;
    }
    plain_ =
        piece().keys.inside(mask().common_keys({mma::row_of<K>(piece(), p.group, 0).query,
                                                mma::row_of<K>(piece(), p.group, last).query + 1}));
    w_.reset();
#pragma unroll
    for (float& x : o_) x = 0.0F;
    // Nobody reads outputs of the piece before any more; of the first one queries are there.
    if (attending_) {
      __syncthreads();
    } else {
      loads_.meet_queries();
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
        return reinterpret_cast<std::uint32_t*>(loads_.queries() + place(row, word / 4)) + word % 4;
      });
      if (lane_ == 0) shared_.query_factors[row] = factor;
    }
    __syncthreads();
    value_factor_ = loads_.scales()[1];
    for (int half = 0; half < 2; ++half) {
      const int row = core::min(row_of(half), core::max(piece().rows - 1, 0));
      query_factor_[half] = shared_.query_factors[row] * loads_.scales()[0];
    }
    value_scales_.reset();
  }

  // ---- a tile of keys ----

  __device__ __forceinline__ void hold_queries() {
    if constexpr (kHolds) {
      if (spreads_) {
        fetch_queries();
        return;
      }
#pragma unroll
      for (int i = 0; i < K.head_dim / 16; ++i) read_queries(i, held_ + 4 * i);
    }
  }
  /// The warp's own rows, from global memory: in shared memory there is room for one warp's.
  __device__ __forceinline__ void fetch_queries() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      const bool exists = row < piece().rows;
      const std::uint16_t* const from =
          loads_.query(piece(), mma::row_of<K>(piece(), p.group, exists ? row : 0));
#pragma unroll
      for (int i = 0; i < K.head_dim / 8; ++i) {
        const int column = i * 8 + lane_ % 4 * 2;
        const bool there = column < p.head_dim;
        const auto* const at = reinterpret_cast<const std::uint32_t*>(from + (there ? column : 0));
        held_[i / 2 * 4 + i % 2 * 2 + half] = exists && there ? *at : 0;
      }
    }
  }
  /// The warp's i-th 16 columns of all rows as the A operand.
  __device__ __forceinline__ void read_queries(int i, std::uint32_t* words) const {
    ptx::load_matrices(
        words, columns(ptx::shared_address(loads_.queries()) + place(lane_ % 16, lane_ / 16) +
                           warp_ % kParts * core::chunk_bytes(kColumns * 2, kTileKeys),
                       i));
  }

  /// Of the tiles under way the first is, or has been, multiplied; into the stage of the one
  /// before, or its own.
  __device__ __forceinline__ void load_next() {
    loads_.release();
    loads_.next();
  }
  /// The next tile is there, and the one before has been multiplied: of all warps, where they
  /// multiply together.
  __device__ __forceinline__ void meet_tile() const {
    if constexpr (together(K)) {
      if (spreads_) {
        ptx::fence_proxy_async();
        __syncthreads();
        return;
      }
    }
    __syncwarp();
  }
  /// The warp's tile; or, where it has rows of its own, all warps'.
  __device__ __forceinline__ void attend_step() {
    if constexpr (together(K)) {
      if (spreads_) {
        attend_together();
        return;
      }
    }
    if constexpr (kLoads == Loads::first) load_next();
    const int tile = together(K) ? tile_ + warp_ : tile_;
    if (!together(K) || tile < tiles_end_) attend(tile);
  }
  __device__ __forceinline__ void attend(int tile) {
    const std::uint32_t keys = ptx::shared_address(shared_.ring.tile(warp_, stage_));
    float scales[4] = {1.0F, 1.0F, 1.0F, 1.0F};
    multiply_keys(keys, [&] {
      if constexpr (kWidens) {
        if (kScalesEarly && p.k_scale.of_slots()) tile_scales(0, key_scales_);
        if (!p.v_scale.of_slots()) return;
        tile_scales(1, scales);
        value_scales_.take(scales, [this](float factor) {
#pragma unroll
          for (float& x : o_) x *= factor;
        });
      }
    });
    if constexpr (kParts > 1) {
      add_other_columns();
      load_next();
    }
    transform(w_.s, tile);
    const auto raise = [this] {
#pragma unroll
      for (int i = 0; i < kColumnsV / 2; ++i) o_[i] *= w_.factor[i / 2 % 2];
    };
    if constexpr (kWidens) {
      w_.weigh_at_once(raise,
                       [&](float weight, int i) { return weight * scales[i / 4 * 2 + i % 2]; });
    } else {
      w_.weigh_at_once(raise);
    }
    multiply_values(keys + kValues);
  }
  /// By token: of the keys (0) or values (1) that the lane has scores of.
  __device__ __forceinline__ void tile_scales(int which, float (&scales)[4]) const {
    const auto* const all = reinterpret_cast<const float*>(shared_.ring.tile(warp_, stage_) +
                                                           kValues + decode_value_bytes(K));
    const auto* const mine =
        reinterpret_cast<const float2*>(all + which * kTileKeys + lane_ % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 two = mine[4 * i];
      scales[2 * i] = two.x;
      scales[2 * i + 1] = two.y;
    }
  }
  /// What the piece's outputs lack.
  __device__ __forceinline__ float value_factor() const {
    if constexpr (!kWidens) return 1.0F;
    return p.v_scale.of_slots() ? value_scales_.top() : value_factor_;
  }

  /// S = Q K^T, of the warp's columns.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply_keys(std::uint32_t keys, const Meanwhile& meanwhile) {
    // Two sums of each product, half as long: a sum waits for the one before it.
    float odd[kTileKeys / 2] = {};
#pragma unroll
    for (float& x : w_.s) x = 0.0F;
    keys += place<kChunkRows>(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2);
#pragma unroll
    for (int i = 0; i < kUnits / 2; ++i) {
      std::uint32_t b[4];
      ptx::load_matrices(b, columns<kChunkRows>(keys, i));
      if constexpr (kWidens) {
        // A unit of a key is 16 columns.
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          std::uint32_t low[2], high[2];
          ptx::widen_four<K.cached>(b[j], low[0], high[0]);
          ptx::widen_four<K.cached>(b[2 + j], low[1], high[1]);
          multiply_columns(j == 0 ? w_.s : odd, 2 * i + j, low[0], high[0], low[1], high[1]);
        }
      } else {
        multiply_columns(i % 2 == 0 ? w_.s : odd, i, b[0], b[1], b[2], b[3]);
      }
    }
    meanwhile();
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) w_.s[i] += odd[i];
  }
  /// S becomes that of all columns. Sums lie where the warp's keys of the tile did; tiles are
  /// loaded to where those of the one before were, which both warps have read by then.
  __device__ __forceinline__ void add_other_columns() {
    static_assert(kParts <= 2);
    float(&s)[kTileKeys / 2] = w_.s;
    const auto of = [this](int warp) {
      return reinterpret_cast<float4*>(shared_.ring.tile(warp, stage_)) + lane_;
    };
    __syncwarp();  // no lane reads keys any more
    float4* const mine = of(warp_);
    mine[0] = {s[0], s[1], s[2], s[3]};
    mine[32] = {s[4], s[5], s[6], s[7]};
    meet_team();
    const float4* const other = of(warp_ ^ 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = other[i * 32];
      s[4 * i] += x.x;
      s[4 * i + 1] += x.y;
      s[4 * i + 2] += x.z;
      s[4 * i + 3] += x.w;
    }
  }
  __device__ __forceinline__ void meet_team() const { ptx::barrier_sync(1 + team(), 32 * kParts); }
  /// The i-th 16 columns of two times 8 keys.
  __device__ __forceinline__ void multiply_columns(float* sums, int i, std::uint32_t first_low,
                                                   std::uint32_t first_high,
                                                   std::uint32_t second_low,
                                                   std::uint32_t second_high) const {
    std::uint32_t a[4];
    const std::uint32_t* queries = a;
    if constexpr (kHolds) {
      queries = held_ + 4 * i;
    } else {
      read_queries(i, a);
    }
    ptx::mma<kType>(sums, queries, first_low, first_high);
    ptx::mma<kType>(sums + 4, queries, second_low, second_high);
  }

  /// Products become base-2 scores (S1), the mask last: of keys of neighbouring tiles, `tile`
  /// first.
  template <int kCount>
  __device__ __forceinline__ void transform(float (&s)[kCount], int tile) {
    if constexpr (kWidens) apply_scales();
    if (p.score.capped) {
#pragma unroll
      for (float& x : s) x = capped_tanh(p.score.pre, x) * p.score.post;
    } else {
#pragma unroll
      for (float& x : s) x *= p.score.pre;
    }
    const bool plain = plain_.begin <= tile && tile + kCount * 2 / kTileKeys <= plain_.end;
    if (plain && !has_extras_) return;
    const core::Range keys = piece().keys.from(tile);
    const int first = keys.begin + lane_ % 4 * 2;
    if (has_extras_) add_row_extras(s, first);
    if (plain) return;
    const core::SequenceMask mask = this->mask();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (mask.special()) {
        hide_each(s, mask.of(query_[half]), half, first, keys.end);
      } else {
        const core::Range seen = {mask.begin_of(query_[half]),
                                  core::min(mask.end_of(query_[half]), keys.end)};
        mask_row(s, half, {seen.begin - first, seen.end - first}, -core::kInfinity);
      }
    }
  }
  /// Products become q . k.
  __device__ __forceinline__ void apply_scales() {
    float scales[4] = {1.0F, 1.0F, 1.0F, 1.0F};
    if (!kScalesEarly && p.k_scale.of_slots()) tile_scales(0, scales);
    const float* const of_keys = kScalesEarly ? key_scales_ : scales;
#pragma unroll
    for (int i = 0; i < kTileKeys / 2; ++i) {
      w_.s[i] *= query_factor_[i / 2 % 2] * of_keys[i / 4 * 2 + i % 2];
    }
  }
  /// Of the half-th row of the lane: what has holes.
  template <int kCount>
  __device__ __forceinline__ static void hide_each(float (&s)[kCount], const core::QueryMask& seen,
                                                   int half, int first, int end) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const int key = first + i / 2 * 8 + i % 2;
      if (key >= end || !seen.visible(key)) s[i / 2 * 4 + 2 * half + i % 2] = -core::kInfinity;
    }
  }
  /// The lane's two rows belong to any two queries and heads.
  template <int kCount>
  __device__ __forceinline__ void add_row_extras(float (&s)[kCount], int first_key) const {
    const core::Sequence& sequence = piece().sequence;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = core::min(row_of(half), core::max(piece().rows - 1, 0));
      const ScorePlace at = {
          sequence.batch,
          piece().head * p.group.value() + mma::row_of<K>(piece(), p.group, row).member,
          query_[half],
          first_key,
          sequence.seqlen_q,
          sequence.seqlen_k};
      add_extras_of_row(p.extras, at, half, s);
    }
  }

  /// O += P V.
  __device__ __forceinline__ void multiply_values(std::uint32_t values) {
    values += place<kChunkRows>(lane_ % 16, lane_ / 16);
#pragma unroll
    for (int i = 0; i < kUnitsV / 2; ++i) {
      std::uint32_t b[4];
      ptx::load_matrices_across(b, columns<kChunkRows>(values, i));
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

  // ---- a step's tiles, for all rows of the block ----

  /// The warps are a warpgroup, and its rows those of the block: keys of all their tiles at once.
  __device__ __forceinline__ void attend_together() {
    constexpr int kKeys = kWarps * kTileKeys;
    const std::uint32_t keys = ptx::shared_address(shared_.ring.tile(0, stage_));
    Weights<kType, kKeys> w(1.0F);
    multiply_keys_together(w.s, ptx::descriptor_along(keys));
    load_next();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(w.s);
    transform(w.s, tile_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w.reference[half] = w_.reference[half];
      w.sum[half] = w_.sum[half];
    }
    w.weigh_at_once([this, &w] {
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] *= w.factor[i / 2 % 2];
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w_.reference[half] = w.reference[half];
      w_.sum[half] = w.sum[half];
    }
    const std::uint32_t values = ptx::descriptor_across(keys + kValues, kChunkRows * kChunkBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      ptx::Wgmma<kType, K.head_dim_v>::registers_across(
          o_, w.operand + 4 * i, ptx::descriptor(values + i * 16 * kChunkBytes / 16), 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(o_);
  }
  /// Begins S = Q K^T; keys: a descriptor.
  template <int kCount>
  __device__ __forceinline__ void multiply_keys_together(float (&s)[kCount],
                                                         std::uint32_t keys) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < K.head_dim / 16; ++i) {
      const int bytes = i / 4 * kChunkRows * kChunkBytes + i % 4 * 32;
      ptx::Wgmma<kType, kCount * 2>::registers(s, held_ + 4 * i, ptx::descriptor(keys + bytes / 16),
                                               i != 0);
    }
    ptx::wgmma_commit();
  }

  // ---- prefixes ----

  /// Rows that have some, in the block's span: what each left is merged.
  __device__ __forceinline__ void join() {
    if (!attending_) return;
    __syncthreads();
    DecodePiece<K>& mine = shared_.pieces[warp_][0];
    DecodeWalk<K> walk(p, shared_.search, loads_.walk().spans().length);
    walk.put(shared_.first, mine);
#pragma unroll 1
    for (bool exists = true; exists && mine.prefix == 0; exists = walk.advance(mine)) {
      if (mine.level > 0 && mine.units.begin == 0) {
        DecodeResults<K>(p, loads_.walk(), mine, shared_.exchange).join();
      }
    }
  }

  static constexpr bool kHolds = K.head_dim <= 128;  ///< queries in registers
  /// Whether scales of keys by token are read while keys are multiplied; Ampere's rows of 256
  /// columns have no registers for that.
  static constexpr bool kScalesEarly = K.arch != Arch::sm80 || K.head_dim != 256;
  /// When a step asks for a tile: before it multiplies its own, so that one more is under way
  /// meanwhile, which takes registers; or after that; or, in a team, once it has met.
  enum class Loads { first, last, met };
  static constexpr Loads kLoads = kParts > 1          ? Loads::met
                                  : K.head_dim <= 128 ? Loads::first
                                                      : Loads::last;
  static_assert(kHolds || K.block_m == kWarpRows);

  const DecodeParams& p;
  const int warp_, lane_;
  DecodeShared<K>& shared_;
  DecodeLoads<K> loads_;
  const bool has_extras_;
  bool attending_ = false;        ///< there is a piece: the span has been found
  bool spreads_ = false;          ///< its rows over the warps
  int tile_ = 0, tiles_end_ = 0;  ///< to be multiplied
  int stage_ = 0;                 ///< of the ring: of the first of them
  core::Range plain_;             ///< tiles whose keys all rows see
  int query_[2];                  ///< of the lane's rows
  std::uint32_t held_[kHolds ? K.head_dim / 4 : 1];
  DecodeWeights<K> w_;
  float o_[kColumnsV / 2];
  // Rows that widen:
  float value_factor_;                              ///< the scale of the piece's values
  float query_factor_[2];                           ///< of the lane's rows, times that of its keys
  float key_scales_[4] = {1.0F, 1.0F, 1.0F, 1.0F};  ///< of the lane's keys of a tile, by token
  ValueScales value_scales_;
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void decode(const DecodeParams& p, char* shared) {
  Decoder<K>(p, shared).run();
}

}  // namespace tessera::cuda::mma
