// Which pieces of work a decoding block has: its span of the line of items (core::Spans). Lengths
// are read here, so no host knows them. Blocks take spans in falling order: who merges an item's
// parts has the first of them, and waits only for blocks with smaller numbers than its own, which
// began before it.
#pragma once

#include "core/work.h"
#include "cuda/mma/decode_params.h"

namespace tessera::cuda::mma {

/// Some of the keys that a block of rows of a key/value head of a sequence sees.
struct DecodePiece {
  core::Sequence sequence;
  core::KeyTiles keys;
  int head = 0;
  int block = 0, blocks = 1;  ///< of rows, and how many the sequence has
  int rows = 0;               ///< of the block
  core::SpanItem item;
  core::Range units;  ///< of the item
  core::Range tiles;  ///< of keys
};

inline constexpr int kBlockRows = 16;

/// Of a row of a piece.
struct DecodeRow {
  int query = 0, member = 0;  ///< of its group
};
__device__ __forceinline__ DecodeRow row_of(const DecodePiece& piece, const core::Divisor& group,
                                            int row) {
  const int at = piece.block * kBlockRows + row, query = group.quotient(at);
  return {query, at - query * group.value()};
}

/// Every warp of the block walks by itself. Lanes do and write the same.
class DecodeWalk {
 public:
  __device__ __forceinline__ explicit DecodeWalk(const DecodeParams& params)
      : p(params),
        spans_(params.spans),
        span_(spans_.count - 1 - static_cast<int>(blockIdx.x)),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ int span() const { return span_; }
  __device__ __forceinline__ const core::Spans& spans() const { return spans_; }

  /// The first piece; false: there is none.
  __device__ __forceinline__ bool first(DecodePiece& piece) {
    if (!find(piece)) return false;
    // A span may begin with the end of an item's fixed part.
    return cut(piece) || next(piece, piece);
  }
  /// The piece after `from`.
  __device__ __forceinline__ bool next(const DecodePiece& from, DecodePiece& piece) const {
    if (p.parts.by_unit && !last_of_item(from)) {
      const int unit = from.units.end;
      put(from, piece);
      take(piece, unit);
      __syncwarp();
      return true;
    }
    const int start = from.item.start + spans_.cost(from.item.units);
    if (start >= end()) return false;
    const int block = from.block + 1 < from.blocks ? from.block + 1 : 0;
    const int head = block > 0 ? from.head : from.head + 1;
    const bool same = head < p.heads;
    if (!same && from.sequence.batch + 1 >= p.batch) return false;
    if (same) {
      put(from, piece);
      piece.head = head;
      if (piece.blocks > 1) set_block(piece, block);
    } else {
      const int batch = from.sequence.batch + 1;
      __syncwarp();
      set_sequence(piece, batch);
    }
    piece.item.start = start;
    __syncwarp();
    return cut(piece);
  }
  /// Does the span have no further units of its item?
  __device__ __forceinline__ bool last_of_item(const DecodePiece& piece) const {
    return piece.units.end == spans_.units_of(piece.item, span_).end;
  }

 private:
  __device__ __forceinline__ int end() const { return (span_ + 1) * spans_.length; }

  __device__ __forceinline__ static void put(const DecodePiece& from, DecodePiece& to) {
    __syncwarp();
    to = from;
    __syncwarp();
  }
  /// The units that the span has of the piece's item, or the first of them; false: there are none.
  __device__ __forceinline__ bool cut(DecodePiece& piece) const {
    const core::Range units = spans_.units_of(piece.item, span_);
    if (units.empty()) return false;
    __syncwarp();
    piece.units = units;
    take(piece, units.begin);
    __syncwarp();
    return true;
  }
  /// All units of the piece, or the one that is a part.
  __device__ __forceinline__ void take(DecodePiece& piece, int unit) const {
    if (p.parts.by_unit) piece.units = {unit, unit + 1};
    piece.tiles = {piece.units.begin * p.unit_tiles,
                   core::min(piece.units.end * p.unit_tiles, piece.keys.count())};
  }

  /// The rows of a block and what they see.
  __device__ __forceinline__ void set_block(DecodePiece& piece, int block) const {
    const int first = block * kBlockRows;
    piece.block = block;
    piece.rows =
        core::max(core::min(kBlockRows, piece.sequence.seqlen_q * p.group.value() - first), 0);
    const core::SequenceMask mask = p.mask.of(p.sequences, piece.sequence);
    const int last = row_of(piece, p.group, piece.rows - 1).query;
    piece.keys = {mask.runs_of({row_of(piece, p.group, 0).query, last + 1}), kTileKeys};
  }
  /// A sequence's first item, but for its place on the line. All its items have as many units: as
  /// many as all its queries see.
  __device__ __forceinline__ void set_sequence(DecodePiece& piece, int batch) const {
    core::Sequence sequence = p.sequences.at(batch);
    p.cache.place(sequence);
    piece.sequence = sequence;
    const core::SequenceMask mask = p.mask.of(p.sequences, sequence);
    piece.keys = {mask.runs_of({0, sequence.seqlen_q}), kTileKeys};
    piece.head = piece.block = 0;
    piece.rows = sequence.seqlen_q * p.group.value();
    piece.blocks = core::max(core::ceil_div(piece.rows, kBlockRows), 1);
    piece.item.units = piece.keys.units(p.unit_tiles, piece.blocks > 1, mask);
    if (piece.blocks > 1) set_block(piece, 0);
  }

  /// The sum of x over the lanes up to this one.
  __device__ __forceinline__ int sum_up_to(int x) const {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(~0U, x, i);
      if (lane_ >= i) x += other;
    }
    return x;
  }

  /// The item at the span's start: first how long the line is, then what lies there.
  __device__ __forceinline__ bool find(DecodePiece& piece) {
    DecodePiece mine;
    int cost = 0, all = 0;
#pragma unroll 1
    for (int first = 0; first < p.batch; first += 32) {
      cost = look_at(first + lane_, mine);
      all += cost;
    }
    all = __shfl_sync(~0U, sum_up_to(all), 31);
    spans_.cut(all);
    const int position = span_ * spans_.length;
    if (position >= all) return false;
#pragma unroll 1
    for (int first = 0, passed = 0;; first += 32) {
      if (p.batch > 32) cost = look_at(first + lane_, mine);
      const int end = passed + sum_up_to(cost);
      const unsigned beyond = __ballot_sync(~0U, position < end);
      if (beyond == 0) {
        passed = __shfl_sync(~0U, end, 31);
        continue;
      }
      if (lane_ == __ffs(static_cast<int>(beyond)) - 1) {
        const int start = end - cost, of_item = spans_.cost(mine.item.units);
        const int item = (position - start) / of_item;
        mine.head = item / mine.blocks;
        mine.item.start = start + item * of_item;
        if (mine.blocks > 1) set_block(mine, item - mine.head * mine.blocks);
        piece = mine;
      }
      __syncwarp();
      return true;
    }
  }
  /// The cost of all items of a sequence; 0 beyond the last one.
  __device__ __forceinline__ int look_at(int batch, DecodePiece& piece) const {
    if (batch >= p.batch) return 0;
    set_sequence(piece, batch);
    return spans_.cost(piece.item.units) * piece.blocks * p.heads;
  }

  const DecodeParams& p;
  core::Spans spans_;
  const int span_;
  const int lane_;
};

}  // namespace tessera::cuda::mma
