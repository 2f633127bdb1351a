// What the forward by mma.sync (forward.h) copies to shared memory: a tile's queries, and its
// blocks of keys and of values from the right to the left. Chunks of 64 columns, rows of 128 bytes,
// units of 16 bytes at their number XOR the row's, so that neither copies nor ldmatrix meet in a
// bank.
#pragma once

#include "core/mma_shape.h"
#include "cuda/mma/forward_params.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/copy_rows.h"

namespace tessera::cuda::mma {

/// A tile of queries of a head, and its keys. In shared memory: what few steps ask for would take
/// registers from all.
struct ForwardTile {
  core::Sequence sequence;
  core::Band band;
  core::KeyBlocks blocks;  ///< of keys that its rows see
  int first_row, head;
  /// Elements to the sequence's first key, and value, of the head; where they lie in pages to the
  /// head's first ones of page 0.
  std::int64_t keys, values;
};

template <core::Kernel K>
class ForwardLoads {
  static constexpr int kN = K.block_n, kThreads = core::mma_threads(K), kStages = K.stages;

 public:
  /// Where in shared memory lie queries; the buffers of keys, and of values; where the values of a
  /// block lie in pages.
  __device__ __forceinline__ ForwardLoads(const ForwardParams& params, std::uint32_t q,
                                          std::uint32_t k, std::uint32_t v, std::uint32_t places)
      : p(params), q_(q), k_(k), v_(v), places_(places) {}

  /// Of a tile: where its keys, or values, begin (ForwardTile).
  __device__ __forceinline__ std::int64_t start_of(const Source& source,
                                                   const core::Sequence& sequence,
                                                   int head_k) const {
    return paged() ? head_k * source.strides.head : sequence.key_offset(source.strides, 0, head_k);
  }

  __device__ __forceinline__ void load_queries(const ForwardTile& tile, int row_count) const {
    const auto* const data = static_cast<const std::uint16_t*>(p.q.data) +
                             tile.sequence.query_offset(p.q.strides, 0, tile.head << p.rows.shift);
    const auto from = [&](int row, const std::uint16_t*& x) {
      const int r = tile.first_row + row;
      const bool exists = r < row_count;
      x = data +
          (exists ? p.rows.query_of(r) * p.q.strides.seqlen + p.rows.member_of(r) * p.q.strides.head
                  : 0);
      return exists;
    };
    if constexpr (K.any_layout) {
      copy_rows<K.block_m, kThreads>(q_, p.head_dim, core::ceil_div(K.head_dim, 64), from);
    } else {
      load<K.block_m, K.head_dim>(q_, p.head_dim, from);
    }
  }
  /// Block n of keys and of values is the next.
  __device__ __forceinline__ void begin(const ForwardTile& tile, int n) {
    if constexpr (kKeeps) next_ = block_of(tile, n);
  }
  /// The next block, number n: its keys, and then its values.
  /// @{
  __device__ __forceinline__ void load_keys(const ForwardTile& tile, int n) {
    const std::uint32_t to = k_ + n % kStages * core::mma_key_bytes(K);
    if (paged()) [[unlikely]] {
      load_paged_keys(to, tile, n);
      return;
    }
    const Block block = kKeeps ? next_ : block_of(tile, n);
    load_block<K.head_dim>(to, block.keys, block.left, p.k.strides.seqlen, p.head_dim);
    if constexpr (kKeeps) next_.keys -= kN * p.k.strides.seqlen;
  }
  __device__ __forceinline__ void load_values(const ForwardTile& tile, int n) {
    const std::uint32_t to = v_ + n % kStages * core::mma_value_bytes(K);
    if (paged()) [[unlikely]] {
      load_paged_values(to, tile, n);
      return;
    }
    const Block block = kKeeps ? next_ : block_of(tile, n);
    load_block<K.head_dim_v>(to, block.values, block.left, p.v.strides.seqlen, p.head_dim_v);
    if constexpr (kKeeps) {
      next_.values -= kN * p.v.strides.seqlen;
      next_.left += kN;
    }
  }
  /// @}

 private:
  static constexpr int kRowsAtOnce = kThreads / 8, kRounds = kN / kRowsAtOnce;
  static_assert(kN % kRowsAtOnce == 0);
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  /// kCount rows of kColumns columns, of which `dim` exist; from(row): where a row begins, of those
  /// that exist.
  template <int kCount, int kColumns, class From>
  __device__ __forceinline__ void load(std::uint32_t to, int dim, const From& from) const {
    const int row = thread() / 8, unit = thread() % 8;
    const std::uint32_t at = to + row * 128 + (unit ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kCount / kRowsAtOnce; ++i) {
      const std::uint16_t* x = nullptr;
      const bool exists = from(row + i * kRowsAtOnce, x);
#pragma unroll
      for (int c = 0; c < core::ceil_div(kColumns, 64); ++c) {
        const bool inside = exists && c * 64 + unit * 8 < dim;
        ptx::copy_async(at + (c * kCount + i * kRowsAtOnce) * 128, x + c * 64 + unit * 8, inside);
      }
    }
  }

  __device__ __forceinline__ bool paged() const { return p.cache.pages.table != nullptr; }

  // ---- rows side by side ----

  /// A block where it lies: the thread's unit of its first row; of any layout the first element.
  struct Block {
    const std::uint16_t *keys, *values;
    int left;  ///< keys from that row on
  };
  /// Whether the next one is kept in registers, or made anew each time: where a thread has few
  /// beside its scores and outputs.
  static constexpr bool kKeeps = K.tile_m * (kN + K.head_dim_v) / core::mma_parts(K) <= 160 * 32;

  __device__ __forceinline__ Block block_of(const ForwardTile& tile, int n) const {
    const int first = n * kN + (K.any_layout ? 0 : thread() / 8);
    const int column = K.any_layout ? 0 : thread() % 8 * 8;
    const auto at = [&](const Source& source, std::int64_t start) {
      return static_cast<const std::uint16_t*>(source.data) + start +
             first * source.strides.seqlen + column;
    };
    return {at(p.k, tile.keys), at(p.v, tile.values), tile.sequence.seqlen_k - first};
  }
  template <int kColumns>
  __device__ __forceinline__ void load_block(std::uint32_t to, const std::uint16_t* from, int left,
                                             std::int64_t stride, int dim) const {
    if constexpr (K.any_layout) {
      copy_rows<kN, kThreads>(to, dim, core::ceil_div(kColumns, 64),
                              [&](int row, const std::uint16_t*& x) {
                                x = from + row * stride;
                                return row < left;
                              });
      return;
    }
    const int row = thread() / 8, unit = thread() % 8;
    const std::uint32_t at = to + row * 128 + (unit ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
#pragma unroll
      for (int c = 0; c < core::ceil_div(kColumns, 64); ++c) {
        const bool inside = i * kRowsAtOnce < left && c * 64 + unit * 8 < dim;
        ptx::copy_async(at + (c * kN + i * kRowsAtOnce) * 128, from + c * 64, inside);
      }
      from += kRowsAtOnce * stride;
    }
  }

  // ---- pages ----

  static constexpr int kAtOnce = kKeeps ? kRounds : 1;  ///< rows of a thread that are unrolled

  /// Block n of keys. Where its values lie is found with them, when there are registers for it.
  __device__ __forceinline__ void load_paged_keys(std::uint32_t to, const ForwardTile& tile,
                                                  int n) const {
    if constexpr (K.any_layout) {
      copy_paged_rows<K.head_dim>(to, p.k, p.head_dim, tile.keys, tile.sequence, n);
      return;
    }
    // Lanes find a row each, of the warp's.
    constexpr int kWarpRows = 4;
    static_assert(kWarpRows * kRounds <= 32);
    const int lane = finder() % 32, warp = finder() / 32;
    const int row = lane / kWarpRows * kRowsAtOnce + warp * kWarpRows + lane % kWarpRows;
    std::int64_t key = kNowhere, value = kNowhere;
    const Place place = row < kN ? place_of(tile.sequence, n * kN + row) : Place{};
    if (place.exists) {
      key = place.offset(tile.keys, p.k.strides);
      value = p.alike ? key : place.offset(tile.values, p.v.strides);
    }
    __syncwarp();  // all lanes have read what lay here
    if (row < kN) ptx::store_shared(places_ + row * 8, value);
#pragma unroll 1
    for (int first = 0; first < kRounds; first += kAtOnce) {
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i) {
        const std::int64_t offset = __shfl_sync(~0U, key, i * kWarpRows + lane / 8);
        copy_row<K.head_dim>(to, i, p.k, offset, p.head_dim);
      }
    }
  }
  /// Block n of values, whose keys were asked for before.
  __device__ __forceinline__ void load_paged_values(std::uint32_t to, const ForwardTile& tile,
                                                    int n) const {
    if constexpr (K.any_layout) {
      copy_paged_rows<K.head_dim_v>(to, p.v, p.head_dim_v, tile.values, tile.sequence, n);
      return;
    }
    __syncwarp();  // all lanes have found their rows
#pragma unroll 1
    for (int first = 0; first < kRounds; first += kAtOnce) {
      std::int64_t places[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        ptx::load_shared(places_ + ((first + i) * kRowsAtOnce + finder() / 8) * 8, places[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        copy_row<K.head_dim_v>(to, first + i, p.v, places[i], p.head_dim_v);
      }
    }
  }
  /// The thread's units of its i-th row of a block; offset: to the row's first element, or
  /// kNowhere. A row that does not exist is not read, but its address is one.
  template <int kColumns>
  __device__ __forceinline__ void copy_row(std::uint32_t to, int i, const Source& source,
                                           std::int64_t offset, int dim) const {
    const int row = finder() / 8, unit = finder() % 8;
    const bool exists = (offset & kNowhere) == 0;
    const auto* const from =
        static_cast<const std::uint16_t*>(source.data) + (offset & ~kNowhere) + unit * 8;
    to += (i * kRowsAtOnce + row) * 128 + (unit ^ row % 8) * 16;
#pragma unroll
    for (int c = 0; c < core::ceil_div(kColumns, 64); ++c) {
      const bool inside = exists && c * 64 + unit * 8 < dim;
      ptx::copy_async(to + c * kN * 128, from + c * 64, inside);
    }
  }
  /// Of any layout: block n.
  template <int kColumns>
  __device__ __forceinline__ void copy_paged_rows(std::uint32_t to, const Source& source, int dim,
                                                  std::int64_t start,
                                                  const core::Sequence& sequence, int n) const {
    copy_rows<kN, kThreads>(to, dim, core::ceil_div(kColumns, 64),
                            [&](int row, const std::uint16_t*& from) {
                              const Place place = place_of(sequence, n * kN + row);
                              from = static_cast<const std::uint16_t*>(source.data);
                              if (place.exists) from += place.offset(start, source.strides);
                              return place.exists;
                            });
  }

  /// The thread's number. Beside queries that are kept it is made anew each time.
  __device__ __forceinline__ static int finder() {
    constexpr bool kKeepsQueries = core::mma_keeps_queries(K);
    return static_cast<int>(kKeepsQueries ? ptx::opaque(threadIdx.x) : threadIdx.x);
  }
  static constexpr std::int64_t kNowhere = 1;  ///< not an offset: these are multiples of 8
  /// Of a key.
  struct Place {
    bool exists = false;
    std::int64_t page = 0;
    int slot = 0;

    /// start: to slot 0 of page 0.
    __device__ __forceinline__ std::int64_t offset(std::int64_t start,
                                                   const core::Strides& strides) const {
      return start + page * strides.batch + slot * strides.seqlen;
    }
  };
  /// Of a key, which may not exist, nor its page.
  __device__ __forceinline__ Place place_of(const core::Sequence& sequence, int key) const {
    if (key >= sequence.seqlen_k) return {};
    const core::Pages& pages = p.cache.pages;
    const core::Pages::Place at = pages.place(sequence.first_k + key, p.page_size);
    const std::int64_t page = pages.at(sequence.entry_k, at.column);
    return {pages.exists(page), page, at.slot};
  }

  const ForwardParams& p;
  const std::uint32_t q_, k_, v_, places_;
  Block next_ = {};  ///< if it is kept
};

}  // namespace tessera::cuda::mma
