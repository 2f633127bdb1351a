// Values that are quantised and become tiles (core/value_tiles.h), on any GPU: they are turned in
// shared memory, four keys a word, and leave it in the order of the tile.
#pragma once

#include "cuda/aux/quantize_pieces.h"

namespace tessera::cuda::aux {

/// Where a column's words of 16 keys lie among its 32: neighbouring columns' and pieces' meet no
/// bank of shared memory twice, neither where they are written nor where they are read.
__device__ __forceinline__ int tile_word(int column, int word) {
  return word ^ ((column / kUnit ^ column % 4 * 2) & 7) * 4;
}

/// Rows of a block of threads that become tiles. kUsual: as QuantizeParams::usual() has it.
template <Dtype kType, bool kUsual>
class TileColumns {
 public:
  __device__ __forceinline__ TileColumns(const QuantizedRows& rows, const core::RowRange& range,
                                         const HeadAt& at, TileShared& shared)
      : rows_(rows), range_(range), at_(at), shared_(shared) {
    from_ = static_cast<const char*>(rows.from.data) +
            at.offset(rows.from.strides, false) * Columns::kSize;
    off_ = at.columns(rows.off, rows);
    scale_ = at.scale(rows);
  }

  __device__ __forceinline__ void write() const {
    constexpr int kKeys = core::ValueTiles::kKeys;
    const int thread = static_cast<int>(threadIdx.x), block = rows_.scales.block;
    const bool written = rows_.scales.by == Scaling::block;
    float factor = 1.0F;
    for (int column = thread; by_channel() && column < rows_.dim; column += kQuantizeThreads) {
      shared_.columns[column] = (Exact(1.0F) / Exact(scale_[column])).x;
    }
    if (written && block > kKeys) factor = scale_keys(range_.begin, range_.end);
    if (rows_.scales.by == Scaling::tensor || rows_.scales.by == Scaling::head) {
      factor = (Exact(1.0F) / Exact(*scale_)).x;
    }
    for (int begin = range_.begin; begin < range_.end; begin += kKeys) {
      if (written && block <= kKeys) {
        for (int key = begin; key < core::min(begin + kKeys, range_.end); key += block) {
          factor = scale_keys(key, core::min(key + block, range_.end));
          if (thread < block) shared_.factors[key - begin + thread] = factor;
        }
      } else {
        shared_.factors[thread] = factor;
      }
      __syncthreads();
      const bool full = kUsual && off_ == nullptr && begin + kKeys <= range_.end;
      if (full && by_channel()) {
        turn<kUsual, true>(begin);
      } else if (full) {
        turn<kUsual, false>(begin);
      } else if (by_channel()) {
        turn<false, true>(begin);
      } else {
        turn<false, false>(begin);
      }
      __syncthreads();
      store(begin);
      __syncthreads();
    }
  }

 private:
  using Columns = Raw<kType, kUnit>;

  __device__ __forceinline__ bool whole() const { return kUsual || rows_.whole; }
  __device__ __forceinline__ bool by_channel() const { return rows_.scales.by == Scaling::channel; }

  __device__ __forceinline__ void load(int key, int column, Columns& raw) const {
    const bool exists = key < range_.end;
    raw.load(from_ + key * rows_.from.strides.seqlen * Columns::kSize, column,
             exists ? rows_.dim : 0, whole());
  }
  __device__ __forceinline__ void load_off(int column, float (&off)[kUnit]) const {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) off[i] = 0.0F;
    if (off_ != nullptr) load_numbers(off_, column, rows_.dim, whole(), 0.0F, off);
  }

  /// Writes the scale of keys [begin, end) and returns what they are multiplied by.
  __device__ __forceinline__ float scale_keys(int begin, int end) const {
    const int pieces = rows_.row_pieces.value();
    Exact most(0.0F);
    for (int i = static_cast<int>(threadIdx.x); i < (end - begin) * pieces; i += kQuantizeThreads) {
      const int key = rows_.row_pieces.quotient(i), column = (i - key * pieces) * kUnit;
      Columns raw;
      load(begin + key, column, raw);
      float off[kUnit];
      load_off(column, off);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) {
        const Exact x = raw.at(j);
        most = ptx::larger_magnitude(most, off_ != nullptr ? x - Exact(off[j]) : x);
      }
    }
    most = largest_of_block(most, shared_.most, 1);
    const Written scaled = Written::of(most, core::limit_of(rows_.dtype));
    if (threadIdx.x == 0) {
      rows_.written[scale_ - rows_.scales.data + rows_.scales.index_of(begin)] = scaled.scale.x;
    }
    return scaled.factor.x;
  }

  /// A tile's keys into shared memory. A thread has four of a piece of columns, which are a word of
  /// each. kFull: all keys are there, and nothing is subtracted. kChannels: by_channel().
  template <bool kFull, bool kChannels>
  __device__ __forceinline__ void turn(int begin) const {
    const int thread = static_cast<int>(threadIdx.x), word = thread % 4;
    for (int column = thread / 4 % 8 * kUnit; column < core::round_up(rows_.dim, 8 * kUnit);
         column += 8 * kUnit) {
      if (column >= rows_.dim) continue;
      float off[kUnit], factors[kUnit];
      if (!kFull) load_off(column, off);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (kChannels) factors[i] = shared_.columns[column + i];
      }
#pragma unroll 1
      for (int group = thread / 32; group < core::ValueTiles::kKeys / 16;
           group += kQuantizeThreads / 32) {
        Columns raw[4];
        int keys[4];
        float by_key[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          keys[i] = group * 16 + core::ValueTiles::key_at(4 * word + i);
          load(begin + keys[i], column, raw[i]);
          by_key[i] = kChannels ? 1.0F : shared_.factors[keys[i]];
        }
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          Exact x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = raw[i].at(j);
            const bool exists = kFull || begin + keys[i] < range_.end;
            if (!kFull && off_ != nullptr && exists) x[i] = x[i] - Exact(off[j]);
            // Of keys behind the last one x is 0, whatever the factor.
            const float factor = kChannels ? factors[j] : by_key[i];
            x[i] = exists ? x[i] * Exact(factor) : Exact(0.0F);
          }
          shared_.words[column + j][tile_word(j + column, 4 * group + word)] =
              narrow_four(Dtype::e4m3, x[0], x[1], x[2], x[3]);
        }
      }
    }
  }

  /// From shared memory to the tile, 16 bytes a thread, all of them in order.
  __device__ __forceinline__ void store(int begin) const {
    const core::ValueTiles tiles = {core::ValueTiles::padded(rows_.dim)};
    char* const to = static_cast<char*>(rows_.to) + at_.sequence.entry_k * rows_.to_strides.batch +
                     at_.head * rows_.to_strides.head +
                     (core::ValueTiles::first_of(at_.sequence) + begin / core::ValueTiles::kKeys) *
                         tiles.tile_bytes();
    constexpr int kPanels = core::ValueTiles::kKeys / core::ValueTiles::kPanelKeys;
    for (int panel = 0; panel < kPanels; ++panel) {
      for (int unit = static_cast<int>(threadIdx.x); unit < 2 * tiles.rows();
           unit += kQuantizeThreads) {
        const int column = unit / 2;
        const int group = 2 * panel + core::ValueTiles::half_of(unit, column);
        constexpr std::uint32_t kOnes = core::ValueTiles::kOne * 0x01010101U;
        const std::uint32_t same = column < tiles.columns ? 0U : kOnes;
        uint4 words = {same, same, same, same};
        if (column < rows_.dim) {
          words =
              *reinterpret_cast<const uint4*>(&shared_.words[column][tile_word(column, 4 * group)]);
        }
        *reinterpret_cast<uint4*>(to + panel * tiles.panel_bytes() + unit * 16) = words;
      }
    }
  }

  const QuantizedRows& rows_;
  const core::RowRange& range_;
  const HeadAt& at_;
  TileShared& shared_;
  const char* from_;
  const float* off_;
  const float* scale_;
};

}  // namespace tessera::cuda::aux
