// Which pieces of work a decoding block has: its span of the line of items (core::Spans). Lengths
// are read here, so no host knows them. Blocks take spans in falling order: who merges an item's
// parts has the first of them, and waits only for blocks with smaller numbers than its own, which
// began before it.
#pragma once

#include "core/work.h"
#include "cuda/mma/decode_params.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/memory.h"

namespace tessera::cuda::mma {

/// Whose keys a piece has, where prefixes are read once (core::Segment).
template <bool kPrefixes>
struct DecodeSegment {};
template <>
struct DecodeSegment<true> {
  int number = 0;  ///< of the segment
  int prefix = 0;  ///< 1: of a prefix, with the queries of all its sequences
  int level = 0;   ///< how many prefixes lie before it
  int parent = 0;  ///< the last of these, a segment's number; below 0: none
};

/// Some of the keys that a block of rows of a key/value head of a sequence sees.
template <core::Kernel K>
struct DecodePiece : DecodeSegment<K.prefixes> {
  core::Sequence sequence;
  core::KeyTiles keys;
  int head = 0;
  int pass = 0;  ///< over its values: rows that take some columns at a time (core::value_passes)
  int block = 0, blocks = 1;  ///< of rows, and how many the sequence has
  int rows = 0;               ///< of the block
  core::SpanItem item;
  core::Range units;  ///< of the item
  core::Range tiles;  ///< of keys

  /// Heads, and the passes over the values of each, are counted together.
  /// @{
  __device__ __forceinline__ int turn(const DecodeParams& p) const {
    return core::value_passes(K) == 1 ? head : head * p.passes + pass;
  }
  __device__ __forceinline__ void set_turn(const DecodeParams& p, int turn) {
    head = turn;
    if constexpr (core::value_passes(K) > 1) {
      head = turn / p.passes;
      pass = turn - head * p.passes;
    }
  }
  /// @}
  /// Of values, the first column.
  __device__ __forceinline__ int column() const {
    return core::value_passes(K) == 1 ? 0 : pass * K.head_dim_v;
  }
};

/// Of a row of a piece.
struct DecodeRow {
  int query = 0, member = 0;  ///< of its group
};
template <core::Kernel K>
__device__ __forceinline__ DecodeRow row_of(const DecodePiece<K>& piece, const core::Divisor& group,
                                            int row) {
  const int at = piece.block * K.block_m + row, query = group.quotient(at);
  return {query, at - query * group.value()};
}

/// A query of a piece, as its sequence has it.
struct DecodeQuery {
  core::Sequence sequence;
  int query = 0;
};
template <core::Kernel K>
__device__ __forceinline__ DecodeQuery query_of(const DecodeParams& p, const DecodePiece<K>& piece,
                                                int query) {
  DecodeQuery at = {piece.sequence, query};
  if constexpr (K.prefixes) {
    if (piece.prefix != 0 && !piece.sequence.packed) {
      const core::Divisor& each = p.prefixes.seqlen_q;
      const int others = each.quotient(query);
      at.sequence.batch += others;
      at.query -= others * each.value();
    }
  }
  return at;
}
/// The mask of a sequence that has these keys.
template <core::Kernel K>
__device__ __forceinline__ core::SequenceMask mask_of(const DecodeParams& p,
                                                      const core::Sequence& sequence,
                                                      const DecodeSegment<K.prefixes>& segment) {
  if constexpr (K.prefixes) {
    if (segment.prefix != 0) return core::MaskRules().of(p.sequences, sequence);
  }
  return p.mask.of(p.sequences, sequence);
}

/// By which a block's warps find their span together.
template <core::Kernel K>
struct DecodeSearch {
  int sums[2][decode_warps(K)];  ///< of the sequences that a warp has looked at, in turns
  DecodePiece<K> found;
};

/// The warps find the span together; then every one walks by itself: its lanes do the same, and the
/// first one writes it (writes()). Each thing is done in one place: the code of a launch comes from
/// memory, so a copy costs time.
template <core::Kernel K>
class DecodeWalk {
 public:
  __device__ __forceinline__ DecodeWalk(const DecodeParams& params, DecodeSearch<K>& search)
      : p(params),
        search_(search),
        spans_(params.spans),
        span_(spans_.count - 1 - static_cast<int>(blockIdx.x)),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// Goes on from a piece that another one has found, whose spans have this length.
  __device__ __forceinline__ DecodeWalk(const DecodeParams& params, DecodeSearch<K>& search,
                                        int length)
      : DecodeWalk(params, search) {
    spans_.length = length;
    begun_ = true;
  }

  __device__ __forceinline__ int span() const { return span_; }
  __device__ __forceinline__ const core::Spans& spans() const { return spans_; }
  /// A block's item of a prefix.
  __device__ __forceinline__ core::SpanItem item_of(const core::Segment& prefix, int head,
                                                    int block) const {
    return core::item_of(prefix, spans_, head, block, line_, p.prefixes.count->prefix_cost);
  }

  /// The span's first piece, for which all warps come at once; later the one after `from`. false:
  /// there is none. The first is what memory says once the grids before are done. While they are
  /// not, `expect` may be told which one it would be by what memory says now.
  template <class Expect>
  __device__ __forceinline__ bool next(const DecodePiece<K>& from, DecodePiece<K>& piece,
                                       const Expect& expect) {
    const bool first = !begun_;
    bool early = first && p.looks_ahead, exists = false;
    Extent seen;
#pragma unroll 1
    for (bool looked = early;; early = false) {
      if (first && !early) {
        ptx::wait_for_grids();
        ptx::launch_dependents();
        begun_ = true;
        if (looked && stands(seen)) return exists;
      }
      exists = step(from, piece, first, seen);
      if (!early) return exists;
      if (exists) expect(piece);
    }
  }
  /// The same in two, for whoever looks not ahead: the first, for which all warps come at once, and
  /// the one after a piece, in its place.
  /// @{
  __device__ __forceinline__ bool begin(DecodePiece<K>& piece) {
    ptx::wait_for_grids();
    ptx::launch_dependents();
    Extent seen;
    return step(piece, piece, true, seen);
  }
  __device__ __forceinline__ bool advance(DecodePiece<K>& piece) {
    Extent seen;
    return step(piece, piece, false, seen);
  }
  /// @}
  /// Does the span have no further units of its item?
  __device__ __forceinline__ bool last_of_item(const DecodePiece<K>& piece) const {
    return piece.units.end == spans_.units_of(piece.item, span_).end;
  }

  /// Copies a piece, a word a lane.
  __device__ __forceinline__ void put(const DecodePiece<K>& from, DecodePiece<K>& to) const {
    static_assert(sizeof(DecodePiece<K>) % 4 == 0 && sizeof(DecodePiece<K>) <= 32 * 4);
    __syncwarp();
    if (&from != &to && lane_ < static_cast<int>(sizeof(DecodePiece<K>) / 4)) {
      memcpy(reinterpret_cast<char*>(&to) + lane_ * 4,
             reinterpret_cast<const char*>(&from) + lane_ * 4, 4);
    }
    __syncwarp();
  }

 private:
  struct Extent;

  /// seen: of the last sequence that the thread has looked at to find the first piece.
  __device__ __forceinline__ bool step(const DecodePiece<K>& from, DecodePiece<K>& piece,
                                       bool first, Extent& seen) {
    if (first) {
      if (!find(piece, seen)) return false;
    } else {
      if (!last_of_item(from)) {  // its units are parts
        const int unit = from.units.end;
        put(from, piece);
        take(piece, piece.keys, {unit, unit + 1});
        return true;
      }
      const int start = from.item.start + spans_.cost(from.item.units);
      if (start >= end()) return false;
      int batch = number_of(from), head = from.turn(p), block = from.block + 1;
      if (block == from.blocks) {
        block = 0;
        ++head;
      }
      if (head == p.heads) {
        head = 0;
        if (++batch == sequences()) return false;
      }
      put(from, piece);
      if (writes()) {
        if (head == 0 && block == 0) set_sequence(piece, look_at(batch));
        piece.set_turn(p, head);
        piece.block = block;
        piece.item.start = start;
      }
      __syncwarp();
    }
    const core::Range units = spans_.units_of(piece.item, span_);
    take(piece, set_rows(piece), units);
    return !units.empty();
  }

  __device__ __forceinline__ int end() const { return (span_ + 1) * spans_.length; }
  /// Does the lane write a piece? One does; but rows with qv have no registers left for a branch
  /// (40 bytes are spilled), and all lanes write the same.
  __device__ __forceinline__ bool writes() const { return K.qv || lane_ == 0; }

  /// These units of the piece's keys, or of them the first, which is a part.
  __device__ __forceinline__ void take(DecodePiece<K>& piece, const core::KeyTiles& keys,
                                       core::Range units) const {
    if (p.parts.by_unit) units.end = units.begin + 1;
    const int unit_tiles = p.unit_tiles.value();
    if (writes()) {
      piece.units = units;
      piece.tiles = {units.begin * unit_tiles, core::min(units.end * unit_tiles, keys.count())};
    }
    __syncwarp();
  }

  /// A sequence: its blocks of rows, and the units of each, which are as many as all its queries
  /// see.
  struct Extent {
    core::Sequence sequence;
    int blocks = 0, units = 1;
    DecodeSegment<K.prefixes> segment;
  };
  __device__ __forceinline__ core::Sequence sequence_at(int batch) const {
    core::Sequence sequence = p.sequences.at(batch);
    // Not from the first-level cache, which would keep what was read too early.
    p.cache.place(sequence, [](const std::int32_t* from) { return ptx::load_relaxed(from); });
    return sequence;
  }
  /// number: of a sequence, or of a segment where prefixes are read once.
  __device__ __forceinline__ Extent look_at(int number) const {
    Extent extent;
    if constexpr (K.prefixes) {
      const core::Segment segment = p.prefixes.segments[number];
      extent.sequence = core::sequence_of(segment, sequence_at(segment.sequence), p.sequences);
      extent.segment = {number, segment.prefix ? 1 : 0, segment.level, segment.parent};
      extent.blocks = segment.blocks;
      extent.units = segment.units;
      if (segment.prefix) return extent;
    } else {
      extent.sequence = sequence_at(number);
    }
    const core::Sequence& sequence = extent.sequence;
    extent.blocks = core::max(core::ceil_div(sequence.seqlen_q * p.group.value(), K.block_m), 1);
    const core::SequenceMask mask = mask_of<K>(p, sequence, extent.segment);
    const core::KeyTiles keys = {mask.runs_of({0, sequence.seqlen_q}), core::decode_tile_keys(K)};
    extent.units = keys.units(p.unit_tiles, extent.blocks > 1, mask);
    return extent;
  }
  __device__ __forceinline__ static void set_sequence(DecodePiece<K>& piece, const Extent& extent) {
    piece.sequence = extent.sequence;
    piece.blocks = extent.blocks;
    piece.item.units = extent.units;
    static_cast<DecodeSegment<K.prefixes>&>(piece) = extent.segment;
  }
  /// How many sequences there are, or segments, and which one a piece has.
  /// @{
  __device__ __forceinline__ int sequences() const {
    if constexpr (K.prefixes) return p.prefixes.count->count;
    return p.batch;
  }
  __device__ __forceinline__ static int number_of(const DecodePiece<K>& piece) {
    if constexpr (K.prefixes) return piece.number;
    return piece.sequence.batch;
  }
  /// @}
  /// The rows of the piece's block, and what they see, which is returned: the lanes have not met.
  __device__ __forceinline__ core::KeyTiles set_rows(DecodePiece<K>& piece) const {
    const core::Sequence sequence = piece.sequence;
    const int first = piece.block * K.block_m;
    const int rows =
        core::max(core::min(K.block_m, sequence.seqlen_q * p.group.value() - first), 0);
    const int end = rows > 0 ? p.group.quotient(first + rows - 1) + 1 : 0;
    const core::SequenceMask mask = mask_of<K>(p, sequence, piece);
    const core::KeyTiles keys = {mask.runs_of({p.group.quotient(first), end}),
                                 core::decode_tile_keys(K)};
    if (writes()) {
      piece.rows = rows;
      piece.keys = keys;
    }
    return keys;
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

  /// Is what a block of threads saw of all sequences still so?
  __device__ __forceinline__ bool stands(const Extent& seen) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (p.batch > decode_threads(K)) return false;
    bool same = true;
    if (thread < p.batch) {
      const core::Sequence now = sequence_at(thread), &then = seen.sequence;
      same = now.entry_k == then.entry_k && now.first_k == then.first_k &&
             now.seqlen_k == then.seqlen_k;
    }
    return __syncthreads_and(same) != 0;
  }

  /// The item at the span's start, but for its rows: twice over all sequences, of which a thread
  /// looks at one, first for how long the line is, then for what lies there.
  __device__ __forceinline__ bool find(DecodePiece<K>& piece, Extent& mine) {
    constexpr int kWarps = decode_warps(K), kThreads = decode_threads(K);
    const int thread = static_cast<int>(threadIdx.x);
    const int all_sequences = sequences();
    int position = -1, of_item = 0, cost = 0, end = 0, all = 0;
#pragma unroll 1
    for (int first = 0, passed = 0, round = 0;; ++round) {
      if (position < 0 || all_sequences > kThreads) {
        const bool exists = first + thread < all_sequences;
        if (exists) mine = look_at(first + thread);
        of_item = spans_.cost(mine.units);
        cost = exists ? of_item * mine.blocks * p.heads : 0;
        end = passed + sum_up_to(cost);
        int* const sums = search_.sums[round % 2];
        if (lane_ == 31) sums[thread / 32] = end - passed;
        __syncthreads();
        all = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          if (w < thread / 32) end += sums[w];
          all += sums[w];
        }
      }
      if (position >= 0) {
        const bool here = position < end && position >= end - cost;
        if (here) {
          const int start = end - cost;
          const int item = static_cast<int>(static_cast<unsigned>(position - start) /
                                            static_cast<unsigned>(of_item));
          DecodePiece<K>& found = search_.found;
          set_sequence(found, mine);
          const int head = mine.blocks > 1 ? item / mine.blocks : item;
          found.set_turn(p, head);
          found.block = item - head * mine.blocks;
          found.item.start = start + item * of_item;
        }
        if (__syncthreads_or(here) != 0) {
          put(search_.found, piece);
          return true;
        }
      }
      passed += all;
      first += kThreads;
      if (first < all_sequences) continue;
      if (position >= 0) return false;
      line_ = passed;
      spans_.cut(line_, p.span_count);
      position = span_ * spans_.length;
      first = passed = 0;
    }
  }

  const DecodeParams& p;
  DecodeSearch<K>& search_;
  core::Spans spans_;
  const int span_;
  const int lane_;
  int line_ = 0;  ///< what all items cost
  bool begun_ = false;
};

}  // namespace tessera::cuda::mma
