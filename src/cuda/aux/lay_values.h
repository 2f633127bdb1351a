// Rows of v of 8 bits on their way into tiles (core/value_tiles.h), on any GPU: what a forward
// needs that was given rows. A warp has the 32 keys of a panel and 64 columns. A thread loads 16
// columns of the four keys that are a word of every column in the tile, turns them in registers,
// and trades words with the three lanes beside it, so that each has whole units of 16 bytes:
// neither shared memory nor other warps are waited for.
#pragma once

#include "cuda/aux/lay_values_params.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/shuffle.h"

namespace tessera::cuda::aux {

/// words[i]: byte i of every one of four words, in their order.
__device__ __forceinline__ void turn_bytes(const std::uint32_t (&x)[4], std::uint32_t* words) {
  const std::uint32_t low = __byte_perm(x[0], x[1], 0x5140), high = __byte_perm(x[0], x[1], 0x7362);
  const std::uint32_t low2 = __byte_perm(x[2], x[3], 0x5140);
  const std::uint32_t high2 = __byte_perm(x[2], x[3], 0x7362);
  words[0] = __byte_perm(low, low2, 0x5410);
  words[1] = __byte_perm(low, low2, 0x7632);
  words[2] = __byte_perm(high, high2, 0x5410);
  words[3] = __byte_perm(high, high2, 0x7632);
}

/// Of four neighbouring lanes, each with four words of every four columns: lane i gets all four
/// words of every i-th column, in the order of the lanes.
__device__ __forceinline__ void trade_words(int lane, std::uint32_t (&x)[kLayUnit]) {
  std::uint32_t out[kLayUnit / 2], in[kLayUnit / 2];
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool second = (lane & step) != 0;
    // Of a pair of words `step` apart a lane keeps the one of its own side.
#pragma unroll
    for (int i = 0; i < kLayUnit / 2; ++i) {
      const int at = step == 1 ? 2 * i : i / 2 * 4 + i % 2;
      out[i] = second ? x[at] : x[at + step];
    }
    ptx::exchange(out, step, in);
#pragma unroll
    for (int i = 0; i < kLayUnit / 2; ++i) {
      const int at = step == 1 ? 2 * i : i / 2 * 4 + i % 2;
      (second ? x[at] : x[at + step]) = in[i];
    }
  }
}

/// The kernel; a block for each of p.blocks.
__device__ __forceinline__ void lay_values(const LayValuesParams& p) {
  using Tiles = core::ValueTiles;
  constexpr int kGroupKeys = 16, kWords = kLayUnit / 4;
  ptx::wait_for_grids();
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int heads = p.groups.quotient(block), columns = block - heads * p.groups.value();
  const int piece = p.heads.quotient(heads), head = heads - piece * p.heads.value();
  const core::RowRange range = p.pieces.of(piece);
  if (range.begin < range.end) {
    const core::Sequence sequence = p.sequences.at(range.batch);
    const int panel = thread / 32, word = thread % kWords, group = thread / kGroupKeys % 2;
    const int first = columns * kLayColumns + thread / kWords % (kLayColumns / kLayUnit) * kLayUnit;
    const char* const from = static_cast<const char*>(p.from.data) + first;

    uint4 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = range.begin + panel * Tiles::kPanelKeys + group * kGroupKeys +
                      Tiles::key_at(4 * word + i);
      rows[i] = uint4{0, 0, 0, 0};
      if (key < range.end && first < p.dim) {
        rows[i] =
            *reinterpret_cast<const uint4*>(from + sequence.key_offset(p.from.strides, key, head));
      }
    }
    std::uint32_t words[kLayUnit];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      std::uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = i == 0 ? rows[j].x : i == 1 ? rows[j].y : i == 2 ? rows[j].z : rows[j].w;
      }
      turn_bytes(x, words + 4 * i);
    }
    trade_words(word, words);

    char* const to =
        static_cast<char*>(p.to) + sequence.entry_k * p.to_strides.batch +
        head * p.to_strides.head +
        (Tiles::first_of(sequence) + range.begin / Tiles::kKeys) * p.tiles.tile_bytes() +
        panel * p.tiles.panel_bytes();
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int column = first + 4 * i + word;
      if (column >= p.tiles.columns) continue;
      *reinterpret_cast<uint4*>(to + column * Tiles::kPanelKeys +
                                Tiles::half_of(group, column) * kGroupKeys) =
          uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
    // The rows of ones go with the last columns, 16 bytes a thread.
    constexpr std::uint32_t kOnes = Tiles::kOne * 0x01010101U;
    if (columns == p.groups.value() - 1 && thread % 32 < 2 * Tiles::kOnes) {
      *reinterpret_cast<uint4*>(to + p.tiles.columns * Tiles::kPanelKeys + thread % 32 * 16) =
          uint4{kOnes, kOnes, kOnes, kOnes};
    }
  }
  ptx::launch_dependents();
}

}  // namespace tessera::cuda::aux
