// How producers fill a ring's buffers with rows of a tensor: one thread asks the copy engine, or,
// in rows of the catalog that take any layout, a warpgroup loads element by element.
#pragma once

#include "cuda/ptx/memory.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/sm90/ring.h"
#include "cuda/sm90/shape.h"
#include "cuda/source.h"
#include "cuda/tile/copy_rows.h"

namespace tessera::cuda::sm90 {

/// Rows of a tensor that fill a buffer.
struct LoadRows {
  int row;    ///< the first
  int valid;  ///< from there to the end of the sequence; those beyond do not count
  int head, batch;
};

/// A sequence's queries, or keys, from one on.
__device__ __forceinline__ LoadRows rows_of(const core::Sequence& sequence, int query, int head) {
  return {sequence.first_q + query, sequence.seqlen_q - query, head, sequence.entry()};
}
__device__ __forceinline__ LoadRows keys_of(const core::Sequence& sequence, int key, int head) {
  return {sequence.first_k + key, sequence.seqlen_k - key, head, sequence.entry()};
}

/// Fills the claimed buffer of item i with kRows rows of `dim` columns, in chunks of kChunkColumns;
/// of a map from column `first` on.
/// heads_first: in the order of a map whose rows are those of several heads. more: bytes that the
/// caller asks the copy engine for besides, on the barrier that is returned.
template <bool kAnyLayout, int kRows, int kChunkColumns = kColumns, class Ring>
__device__ __forceinline__ std::uint32_t fill(const Ring& ring, std::uint32_t i,
                                              const ptx::TensorMap& map, const Source& source,
                                              int dim, int chunks, const LoadRows& rows,
                                              bool heads_first = false, std::uint32_t more = 0,
                                              int first = 0) {
  const std::uint32_t to = ring.buffer(i);
  if constexpr (kAnyLayout) {
    const auto* const from = static_cast<const std::uint16_t*>(source.data) +
                             rows.batch * source.strides.batch + rows.head * source.strides.head +
                             rows.row * source.strides.seqlen;
    copy_rows<kRows, kCopyingThreads>(to, dim, chunks, [&](int row, const std::uint16_t*& x) {
      x = from + row * source.strides.seqlen;
      return row < rows.valid;
    });
    ptx::fence_proxy_async();
    return ring.announce(i, threadIdx.x == 0 ? more : 0);
  } else {
    const std::uint32_t full = ring.announce(i, ring.bytes + more);
    for (int c = 0; c < chunks; ++c) {
      ptx::tma_load(to + c * kRows * 128, map, full, first + c * kChunkColumns,
                    heads_first ? rows.head : rows.row, heads_first ? rows.row : rows.head,
                    rows.batch);
    }
    return full;
  }
}

}  // namespace tessera::cuda::sm90
