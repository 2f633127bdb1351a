// Which pieces of work a decoding block has: its span of the line of items (core::Spans). Lengths
// are read here, so no host knows them. Blocks take spans in falling order: who merges an item's
// parts has the first of them, and waits only for blocks with smaller numbers than its own, which
// began before it.
#pragma once

#include "core/work.h"
#include "cuda/mma/decode_params.h"

namespace tessera::cuda::mma {

/// Some of the keys of a key/value head of a sequence.
struct DecodePiece {
  core::Sequence sequence;
  core::KeyTiles keys;
  int head = 0;
  core::SpanItem item;
  core::Range units;  ///< of the item
  core::Range tiles;  ///< of keys
};

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
      DecodePiece to = from;
      take(to, from.units.end);
      put(to, piece);
      return true;
    }
    const int start = from.item.start + spans_.cost(from.item.units);
    if (start >= end()) return false;
    const bool same = from.head + 1 < p.heads;
    if (!same && from.sequence.batch + 1 >= p.batch) return false;
    DecodePiece to = same ? from : of_sequence(from.sequence.batch + 1);
    to.head = same ? from.head + 1 : 0;
    to.item.start = start;
    put(to, piece);
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
    DecodePiece to = piece;
    to.units = units;
    take(to, units.begin);
    put(to, piece);
    return true;
  }
  /// All units of the piece, or the one that is a part.
  __device__ __forceinline__ void take(DecodePiece& piece, int unit) const {
    if (p.parts.by_unit) piece.units = {unit, unit + 1};
    piece.tiles = {piece.units.begin * p.unit_tiles,
                   core::min(piece.units.end * p.unit_tiles, piece.keys.count())};
  }

  /// A sequence's first item, but for its place on the line.
  __device__ __forceinline__ DecodePiece of_sequence(int batch) const {
    DecodePiece piece;
    piece.sequence = p.sequences.at(batch);
    p.cache.place(piece.sequence);
    const core::SequenceMask mask = p.mask.of(p.sequences, piece.sequence);
    piece.keys = {mask.runs_of({0, piece.sequence.seqlen_q}), kTileKeys};
    piece.item.units = piece.keys.units(p.unit_tiles);
    return piece;
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
    all = __shfl_sync(~0U, sum_up_to(all), 31) * p.heads;
    spans_.cut(all);
    const int position = span_ * spans_.length;
    if (position >= all) return false;
#pragma unroll 1
    for (int first = 0, passed = 0;; first += 32) {
      if (p.batch > 32) cost = look_at(first + lane_, mine);
      const int end = passed + sum_up_to(cost) * p.heads;
      const unsigned beyond = __ballot_sync(~0U, position < end);
      if (beyond == 0) {
        passed = __shfl_sync(~0U, end, 31);
        continue;
      }
      if (lane_ == __ffs(static_cast<int>(beyond)) - 1) {
        const int start = end - cost * p.heads;
        mine.head = (position - start) / cost;
        mine.item.start = start + mine.head * cost;
        piece = mine;
      }
      __syncwarp();
      return true;
    }
  }
  /// The cost of one of a sequence's items; 0 beyond the last sequence.
  __device__ __forceinline__ int look_at(int batch, DecodePiece& piece) const {
    if (batch >= p.batch) return 0;
    piece = of_sequence(batch);
    return spans_.cost(piece.item.units);
  }

  const DecodeParams& p;
  core::Spans spans_;
  const int span_;
  const int lane_;
};

}  // namespace tessera::cuda::mma
