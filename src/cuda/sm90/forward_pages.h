// How the Hopper forward kernel's producer fetches keys and values that lie in pages: in boxes of
// rows of one page. A box is as high as divides a page and a block of keys. The swizzle goes by
// addresses in shared memory, so boxes of any height fill a buffer as one of the whole block would.
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/sm90/forward_buffers.h"
#include "cuda/sm90/forward_params.h"
#include "cuda/sm90/load.h"

namespace tessera::cuda::sm90 {

/// Where the row of one of the keys lies, in pages or not; false: in a page that does not exist.
__device__ __forceinline__ bool find_slot(const std::uint16_t*& from, const Source& source,
                                          const core::Cache& cache, const LoadRows& keys, int key) {
  std::int64_t entry = keys.batch;
  int slot = keys.row + key;
  if (cache.pages.table != nullptr) {
    const core::Pages::Place place = cache.pages.place(slot);
    entry = cache.pages.at(keys.batch, place.column);
    if (!cache.pages.exists(entry)) return false;
    slot = place.slot;
  }
  from = static_cast<const std::uint16_t*>(source.data) + entry * source.strides.batch +
         keys.head * source.strides.head + slot * source.strides.seqlen;
  return true;
}

/// Each warp of the producing warpgroup has some boxes of every block, one a lane, and all warps
/// that have any walk alike: none can fall behind, since without its boxes no buffer becomes full.
template <core::Kernel K>
class PageBoxes {
  static constexpr int kWarps = 4;
  static_assert(K.block_n <= 32 * kWarps);

 public:
  __device__ __forceinline__ explicit PageBoxes(const ForwardParams& params) : p(params) {}

  /// Whether the warp has a box.
  __device__ __forceinline__ static bool takes_part(const ForwardParams& p) {
    return static_cast<int>(threadIdx.x) / 32 * p.box_keys < K.block_n;
  }

  /// All warps that take part wait for each other.
  __device__ __forceinline__ void meet() const {
    const int boxes = p.box_keys;
    const int warps = boxes * 4 <= K.block_n   ? 4
                      : boxes * 3 <= K.block_n ? 3
                      : boxes * 2 <= K.block_n ? 2
                                               : 1;
    __syncwarp();
    ptx::barrier_sync(1 + 2 * ForwardShape<K>::kGroups, 32 * warps);
  }

  /// The page of the lane's box of the keys from `keys` on. One that does not exist, or of keys
  /// that do not, has a number from which the copy engine fetches zeros.
  __device__ __forceinline__ int look_up(const LoadRows& keys) const {
    const int row = row_of_box();
    if (row >= core::min(K.block_n, keys.valid)) return -1;
    const core::Pages& pages = p.cache.pages;
    const std::int64_t at = keys.batch * pages.stride + p.page_size.quotient(keys.row + row);
    if (pages.ids == PageIds::i32) return static_cast<const std::int32_t*>(pages.table)[at];
    const std::int64_t page = static_cast<const std::int64_t*>(pages.table)[at];
    return pages.exists(page) ? static_cast<int>(page) : -1;
  }

  /// Asks for the lane's box, which lies in `page`; to: the buffer, which has been claimed.
  __device__ __forceinline__ void fetch(std::uint32_t to, std::uint32_t full,
                                        const ptx::TensorMap& map, int chunks, const LoadRows& keys,
                                        int page) const {
    // No lane falls behind its warp.
    __syncwarp();
    const int row = row_of_box();
    if (row >= K.block_n) return;
    const int slot = p.page_size.remainder(keys.row + row);
    for (int c = 0; c < chunks; ++c) {
      ptx::tma_load(to + (c * K.block_n + row) * 128, map, full, c * kColumns, slot, keys.head,
                    page);
    }
  }

 private:
  /// Of a buffer, where the lane's box begins. Made anew each time: a producer has few registers.
  __device__ __forceinline__ int row_of_box() const {
    const int thread = static_cast<int>(ptx::opaque(threadIdx.x));
    return (thread / 32 + thread % 32 * kWarps) * p.box_keys;
  }

  const ForwardParams& p;
};

}  // namespace tessera::cuda::sm90
