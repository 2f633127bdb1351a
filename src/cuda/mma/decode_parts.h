// Into which parts an item of decoding is cut, and who merges them: blocks of threads that have
// some of its units each leave what they made in slots, and take in others' in a tree
// (core::PartTree). A block takes in parts of blocks that began before it.
#pragma once

#include "cuda/mma/decode_walk.h"

namespace tessera::cuda::mma {

/// Parts in slots that are 2^shift apart.
struct OtherParts {
  int slot, shift, count;
};

/// Of a piece's item, and of the part that the piece is.
template <core::Kernel K>
class ItemParts {
 public:
  __device__ __forceinline__ ItemParts(const DecodeParams& params, const DecodeWalk<K>& walk,
                                       const DecodePiece<K>& piece)
      : p(params), walk_(walk), piece_(piece) {}

  __device__ __forceinline__ int count() const {
    if (p.parts.by_unit) return piece_.item.units;
    const core::Spans& spans = walk_.spans();
    return spans.span_of(piece_.item, piece_.item.units - 1) - spans.span_of(piece_.item, 0) + 1;
  }
  /// Which of them the block has; by_unit: the one that becomes the result.
  __device__ __forceinline__ int part() const {
    return p.parts.by_unit ? 0 : walk_.span() - walk_.spans().span_of(piece_.item, 0);
  }
  /// Where the piece's is left for others.
  __device__ __forceinline__ int slot() const {
    return p.parts.by_unit ? first_slot() + piece_.units.begin : walk_.span();
  }
  /// Does the block take in others now? by_unit: it has the first one, and has left all of its own.
  __device__ __forceinline__ bool merges() const {
    if (!p.parts.by_unit) return part() == 0 || others(part(), count(), 0).count > 0;
    return walk_.spans().units_of(piece_.item, walk_.span()).begin == 0 &&
           walk_.last_of_item(piece_);
  }
  /// Those that the block takes in at a level of the tree; by_unit: all at once.
  __device__ __forceinline__ OtherParts others(int part, int parts, int shift) const {
    if (p.parts.by_unit) return {first_slot(), 0, shift == 0 ? parts : 0};
    return {walk_.span() + (1 << shift), shift, core::PartTree{parts}.others(part, shift)};
  }

 private:
  /// by_unit: of the item's parts.
  __device__ __forceinline__ int first_slot() const {
    const int head = piece_.sequence.batch * p.heads + piece_.turn(p);
    return (head * p.parts.blocks + piece_.block) * p.parts.units;
  }

  const DecodeParams& p;
  const DecodeWalk<K>& walk_;
  const DecodePiece<K>& piece_;
};

}  // namespace tessera::cuda::mma
