// How the Hopper forward kernel fetches keys and values that lie in pages, and finds their pages:
// two warps fetch keys, two values, each at its own pace. Boxes of the copy engine lie in one page;
// the swizzle goes by addresses in shared memory, so boxes of any height fill a buffer as one of
// the whole block would. Low ones take the copy engine too long: then threads copy rows, 16 bytes
// each at a time.
#pragma once

#include "cuda/ptx/math.h"
#include "cuda/ptx/mma.h"
#include "cuda/sm90/forward_tiles.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::sm90 {

/// A warp's part of blocks of keys or of values, of kChunks chunks. The parts are alike: a block's
/// buffer becomes full when all have done theirs.
template <core::Kernel K, int kChunks>
class PageFetcher {
  static constexpr int kWarpRows = K.block_n / kPageWarps;  ///< that a warp copies
  static constexpr int kAtOnce = 4;                         ///< rows: 8 lanes have 128 bytes of one
  static constexpr bool kLooksAhead = ForwardShape<K>::kProducerRegisters > 24;
  static_assert(K.block_n / kLeastBox <= 32 * kPageWarps);
  static_assert(kWarpRows % 8 == 0);

 public:
  __device__ __forceinline__ explicit PageFetcher(const ForwardParams& params) : p(params) {}

  /// Whether the warp has a part of every block.
  __device__ __forceinline__ static bool takes_part(const ForwardParams& p) {
    return p.copies_rows() || part() * p.box_keys < K.block_n;
  }

  /// Warps of keys and of values take turns: those of one box a block are on two of a
  /// multiprocessor's schedulers.
  __device__ __forceinline__ static bool has_values() { return thread() / 32 % 2 != 0; }
  __device__ __forceinline__ static int part() { return thread() / 64; }

  /// The page of the lane's box, or of the first row that it looks up, of a block. One that does
  /// not exist, or of keys that do not, has a number that no page has.
  __device__ __forceinline__ int look_up(const LoadRows& keys) const {
    return look_up(keys, p.copies_rows() ? copied_row(0) : box_row());
  }

  /// Waits for the buffer and fetches the warp's part of a block, whose pages the lanes have looked
  /// up, from a column on.
  __device__ __forceinline__ void fetch(const Ring<kStages>& ring, std::uint32_t item,
                                        const ptx::TensorMap& map, const Source& source, int dim,
                                        const LoadRows& keys, int page, int first_column) const {
    if (p.copies_rows()) {
      ring.claim(item);
      copy(ring.buffer(item), source, dim - first_column, keys, page, first_column);
      // What the copy engine and wgmma see is what has come before the fence.
      ptx::copy_commit();
      ptx::copy_wait<0>();
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane() == 0) ring.arrive_full(item);
      return;
    }
    const int row = box_row();
    const int slot = p.page_size.remainder(keys.row + row);
    const std::uint32_t to = ring.buffer(item) + row * 128;
    ring.claim(item);
    // Whoever is ahead of the thread that announces the bytes takes them away before.
    if (part() == 0 && lane() == 0) ring.announce(item, ring.bytes);
    // No lane falls behind its warp.
    __syncwarp();
    if (row < K.block_n) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ptx::tma_load(to + c * K.block_n * 128, map, ring.full_barrier(item),
                      first_column + c * kColumns, slot, keys.head, page);
      }
    }
  }

 private:
  // Made anew each time: a producer has few registers.
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(ptx::opaque(threadIdx.x));
  }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  /// Of a buffer, where the lane's box begins.
  __device__ __forceinline__ int box_row() const {
    return (part() + lane() * kPageWarps) * p.box_keys;
  }
  /// Of a buffer, the row whose page the lane looks up, of the warp's rows from `first` on.
  __device__ __forceinline__ int copied_row(int first) const {
    return first + lane() < kWarpRows ? part() * kWarpRows + first + lane() : K.block_n;
  }

  __device__ __forceinline__ int look_up(const LoadRows& keys, int row) const {
    if (row >= core::min(K.block_n, keys.valid)) return -1;
    const core::Pages& pages = p.cache.pages;
    const std::int64_t at = keys.batch * pages.stride + p.page_size.quotient(keys.row + row);
    if (pages.ids == PageIds::i32) return static_cast<const std::int32_t*>(pages.table)[at];
    const std::int64_t page = static_cast<const std::int64_t*>(pages.table)[at];
    return pages.exists(page) ? static_cast<int>(page) : -1;
  }

  /// The warp's rows, as many at a time as it has lanes that look up pages; `page`: of the first
  /// ones.
  __device__ __forceinline__ void copy(std::uint32_t to, const Source& source, int dim,
                                       const LoadRows& keys, int page, int first_column) const {
    // Where the lane's unit of the first of four rows lies, in the first chunk.
    const int unit = lane() % 8, line = lane() / 8;
    std::uint32_t place = to + (part() * kWarpRows + line) * 128 + (unit ^ line) * 16;
    std::uint64_t from = 0;
#pragma unroll(kLooksAhead ? 2 : 1)
    for (int row = 0; row < kWarpRows; row += kAtOnce) {
      if (row % 32 == 0) {
        if (!kLooksAhead && row > 0) page = look_up(keys, copied_row(row));
        const int slot = p.page_size.remainder(keys.row + copied_row(row));
        // 0: in a page that does not exist.
        from =
            p.cache.pages.exists(page)
                ? reinterpret_cast<std::uint64_t>(
                      static_cast<const std::uint16_t*>(source.data) + page * source.strides.batch +
                      slot * source.strides.seqlen + keys.head * source.strides.head + first_column)
                : 0;
        if (kLooksAhead && row + 32 < kWarpRows) page = look_up(keys, copied_row(row + 32));
      }
      const std::uint64_t x = __shfl_sync(~0U, from, (row + line) % 32);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ptx::copy_async(place + c * K.block_n * 128,
                        reinterpret_cast<const std::uint16_t*>(x) + c * kColumns + unit * 8,
                        x != 0 && c * kColumns + unit * 8 < dim);
      }
      // The swizzle: four rows on, a unit lies 4 units further or back in its line.
      place = (place ^ 64) + kAtOnce * 128;
    }
  }

  const ForwardParams& p;
};

/// A warp that fetches keys, or values, of all tiles. None can fall behind: without its part no
/// buffer becomes full. The first warp of the keys hands out the tiles, too.
template <core::Kernel K, bool kValues>
class PageProducer : TileProducer<K, true> {
  using Base = TileProducer<K, true>;
  using Fetcher = PageFetcher<K, kValues ? ForwardShape<K>::kChunksV : ForwardShape<K>::kChunks>;
  using Base::buffers;
  using Base::p;
  using typename Base::S;

 public:
  __device__ __forceinline__ PageProducer(const ForwardParams& params,
                                          const ForwardBuffers<K>& shared)
      : Base(params, shared), fetcher_(params) {}

  __device__ __forceinline__ void run() {
    core::Work work;
    while (Base::next(work)) produce(work);
    if (!hands_out()) return;
    for (int share = 0; share < S::kShares; ++share) {
      Base::describe_end();
      Base::load_queries({}, false, share);
    }
  }

 private:
  /// A tile.
  __device__ __forceinline__ void produce(const core::Work& work) {
    typename Base::Found found;
    if (!Base::find(work, found)) return;
    const core::Range blocks = found.blocks;
    if (blocks.empty()) {
      hand_out(found);
      return;
    }
    found.head_k =
        static_cast<int>(ptx::opaque(static_cast<std::uint32_t>(p.group.quotient(work.head))));
    int page = fetcher_.look_up(Base::keys_at(found, blocks.end - 1));
    for (int n = blocks.end - 1; n >= blocks.begin; --n, ++item_) {
      const LoadRows keys = Base::keys_at(found, n);
      if constexpr (kValues) {
        fetcher_.fetch(buffers.v, item_, p.v, p.v_source, p.head_dim_v, keys, page,
                       buffers.first_column_v());
      } else {
        fetcher_.fetch(buffers.k, item_, p.k, p.k_source, p.head_dim, keys, page,
                       buffers.first_column());
        if (n == blocks.end - 1) hand_out(found);
      }
      // Page numbers come while the next buffer is waited for.
      if (n > blocks.begin) page = fetcher_.look_up(Base::keys_at(found, n - 1));
    }
  }

  __device__ __forceinline__ static bool hands_out() {
    return !kValues && agreed(Fetcher::part() == 0);
  }
  __device__ __forceinline__ void hand_out(const typename Base::Found& found) {
    if constexpr (!kValues) {
      if (!hands_out()) return;
      const LoadRows rows = Base::queries_of(found);
#pragma unroll 1
      for (int share = 0; share < S::kShares; ++share) {
        Base::describe(found, share);
        Base::load_queries(rows, !found.blocks.empty(), share);
      }
    }
  }

  const Fetcher fetcher_;
  std::uint32_t item_ = 0;  ///< next in the ring
};

/// All warps of the producing warpgroup.
template <core::Kernel K>
__device__ __forceinline__ void fetch_pages(const ForwardParams& p,
                                            const ForwardBuffers<K>& buffers) {
  using Fetcher = PageFetcher<K, ForwardShape<K>::kChunks>;
  if (!Fetcher::takes_part(p)) return;
  if (agreed(Fetcher::has_values())) {
    PageProducer<K, true>(p, buffers).run();
  } else {
    PageProducer<K, false>(p, buffers).run();
  }
}

}  // namespace tessera::cuda::sm90
