// What the planner knows of each GPU architecture that has kernels: numbers that refusals and costs
// of its rows follow. A new architecture is a new entry; without one it does not compile.
#pragma once

#include "plan/catalog.h"

namespace tessera {

/// The same of rows by mma.sync, which devices of several kinds run. What a block may have
/// of shared memory tells two kinds apart: those with much have tensor cores that are twice as
/// fast, and that are kept waiting where a warp has 16 rows and reads keys and values for so few.
struct MmaCosts {
  std::int64_t much_memory = 0;  ///< bytes of a block
  double multiply_adds = 0.0;    ///< a cycle of a multiprocessor, without much memory; with: twice
  double waiting = 0.0;          ///< times as long, with much memory, of 16 rows a warp
  double alone = 0.0;            ///< the same, of a block that has a multiprocessor for itself
  double latency = 0.0;          ///< of a step of a warp beside its multiply-adds; backward twice
  double paged_latency = 0.0;    ///< the same where keys lie in pages
  double softcap = 1.0, extras = 1.0, any_layout = 1.0;  ///< times as long, each
  double tile = 0.0;                                     ///< from tile to tile
  /// Where warps share rows: the same, and times as long as their multiply-adds say.
  double shared_tile = 0.0, shared = 1.0;
};

/// Fitted on one board of 9.0.
inline constexpr MmaCosts kMmaCosts = {
    .much_memory = 128 << 10,
    .multiply_adds = 512.0,
    .waiting = 1.25,
    .alone = 1.05,
    .latency = 1300.0,
    .paged_latency = 2500.0,
    .softcap = 1.5,
    .extras = 3.0,
    .any_layout = 4.0,
    .tile = 2500.0,
    .shared_tile = 5900.0,
    .shared = 1.09,
};

/// What a row of an architecture costs, in cycles of a multiprocessor (cost_gpu.cpp). Fitted to
/// measured choices; good for comparing rows of the same architecture only. What no row of it has
/// is left out.
struct GpuCosts {
  double multiply_adds = 0.0;  ///< a cycle, of 16-bit operands
  double step = 0.0;           ///< beside its multiply-adds
  /// The shortest that a step of a warpgroup can be, from its scores to its weights: a chain of
  /// latencies. And where they go through two warpgroups (core::splits_roles).
  double latency = 0.0, latency_of_roles = 0.0;
  double extras = 1.0, any_layout = 1.0;  ///< times as long, each
  double exchanged = 1.0;                 ///< the same, of rows that exchange dS
  double decode_step = 0.0;               ///< all of a step of a decoding row
  /// The same where several blocks of rows read the same keys, and what it is more for every column
  /// of keys and values.
  double decode_again = 0.0, decode_column = 0.0;
  double decode_read = 0.0;  ///< bytes a cycle that memory gives then; 0: it is not what binds
  double latent_step = 0.0,
         latent_row = 0.0;  ///< of a decoding row with qv, and of each of its rows
  double tile_row = 0.0;    ///< from tile to tile, a row
  double alone = 0.0;       ///< more than that, forward, where a tile has few keys
  /// Forward rows with one buffer of queries: a wait from tile to tile, and what a step is then.
  double wait = 0.0, waiting_step = 1.0;
  /// Forward rows with larger tiles at larger head dims are crowded: they read keys and values less
  /// often, but have few registers and more to do from tile to tile. And of few query rows they
  /// make so few tiles that multiprocessors stay idle.
  int uncrowded_rows = 0, uncrowded_dim = 0;
  int few_rows = 0;                            ///< less than this
  double crowded = 1.0, crowded_of_few = 1.0;  ///< times as long as their multiply-adds say
  double crowded_tile_row = 0.0;               ///< instead of tile_row
  /// All of this of rows whose weights have 8 bits, which take longer than their products; latency,
  /// and what crowds them, is in it.
  double eight_bit_multiply_adds = 1.0, eight_bit_step = 0.0;
  double eight_bit_tile_row = 0.0, eight_bit_crowded_tile_row = 0.0;
  MmaCosts mma = {};
  double moved = 1.0;  ///< bytes a cycle, where values are laid out as tiles
};

struct GpuFacts {
  Arch arch;
  const char* loader;  ///< what loads keys and values where a row is not any_layout, in words
  int load_bytes;      ///< that it loads at least: addresses and strides are multiples
  bool shares_rows;    ///< whether a tile can have the rows of several query heads
  int counted_bits;    ///< tiles, and rows of heads that share them, number at most 2^this
  GpuCosts costs;
};

/// The same of wide rows alone, whose warps share rows all.
inline constexpr MmaCosts kWideCosts = [] {
  MmaCosts costs = kMmaCosts;
  costs.softcap = 1.0;
  costs.tile = 0.0;
  return costs;
}();

/// The same of Turing's rows: none has much memory, or a softcap and nothing else, or shares rows.
inline constexpr MmaCosts kTuringCosts = [] {
  MmaCosts costs = kMmaCosts;
  costs.much_memory = 0;
  costs.waiting = 0.0;
  costs.softcap = costs.shared = 1.0;
  costs.shared_tile = 0.0;
  return costs;
}();

inline constexpr GpuFacts kGpuFacts[] = {
    {
        .arch = Arch::sm90,
        .loader = "copy engine",
        .load_bytes = 16,
        .shares_rows = true,
        .counted_bits = 30,  // the kernels count a little further, in 32
        .costs =
            {
                .multiply_adds = 2048.0,
                .step = 150.0,
                .latency = 1300.0,
                .latency_of_roles = 1600.0,
                .extras = 4.0,
                .any_layout = 4.0,
                .exchanged = 0.87,
                .decode_step = 300.0,
                .decode_again = 600.0,
                .decode_column = 5.0,
                .latent_step = 2500.0,
                .latent_row = 20.0,
                .tile_row = 8.0,
                .alone = 2000.0,
                .wait = 1430.0,
                .waiting_step = 0.99,
                .uncrowded_rows = 128,
                .uncrowded_dim = 64,
                .few_rows = 2048,
                .crowded = 0.905,
                .crowded_of_few = 1.4,
                .crowded_tile_row = 22.0,
                .eight_bit_multiply_adds = 11000.0,
                .eight_bit_step = 1620.0,
                .eight_bit_tile_row = 47.0,
                .eight_bit_crowded_tile_row = 35.3,
                .mma = kWideCosts,
                .moved = 16.0,
            },
    },
    {
        .arch = Arch::sm75,
        .loader = "16-byte loads",
        .load_bytes = 16,
        .shares_rows = true,
        .counted_bits = 30,
        .costs =
            {
                .decode_step = 300.0,
                .decode_again = 200.0,
                .decode_column = 3.0,
                .decode_read = 16.5,
                .mma = kTuringCosts,
            },
    },
    {
        .arch = Arch::sm80,
        .loader = "cp.async",
        .load_bytes = 16,
        .shares_rows = true,
        .counted_bits = 30,
        .costs =
            {
                .decode_step = 300.0,
                .decode_again = 200.0,
                .decode_column = 3.0,
                .decode_read = 16.5,
                .mma = kMmaCosts,
            },
    },
};

/// Null: none of a GPU's rows is for it.
constexpr const GpuFacts* find_facts(Arch arch) {
  for (const GpuFacts& facts : kGpuFacts) {
    if (facts.arch == arch) return &facts;
  }
  return nullptr;
}

/// Precondition: the architecture of a GPU's row.
constexpr const GpuFacts& facts_of(Arch arch) { return *find_facts(arch); }

static_assert([] {
  for (const core::Kernel& row : kCatalog) {
    if (is_gpu(row.arch) != (find_facts(row.arch) != nullptr)) return false;
  }
  return true;
}());

}  // namespace tessera
