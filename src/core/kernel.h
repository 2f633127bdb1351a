// One row of the catalog: everything that distinguishes one kernel from another, as a value. It is
// a structural type, so a kernel takes its row as a template argument and reads its tile sizes from
// it.
#pragma once

#include "core/hd.h"
#include "tessera/types.hpp"

namespace tessera::core {

/// The loop structure.
enum class Form : std::uint8_t {
  tile,    ///< a block of query rows walks over blocks of keys (backward: the other way round)
  decode,  ///< few query rows: every key and value is read once (CPU: head_dim lies along the
           ///< lanes)
};

/// What the multiply-add instructions take.
enum class Operand : std::uint8_t {
  f32,      ///< fp32 FMA; 16-bit tensors are widened tile by tile
  bf16,     ///< bf16 into fp32 (VDPBF16PS, wgmma, mma.sync)
  f16,      ///< fp16 into fp32 (wgmma, mma.sync)
  e4m3,     ///< 8 bits into 22 or so (wgmma): sums are promoted to fp32 in time
  i8_bf16,  ///< scores of i8, exactly; weights and values of bf16 into fp32 (wgmma)
  i8_f16,   ///< the same, and fp16
};

/// What a GPU row does between a product and its weight besides scale and mask. All of it in one
/// row would cost the others their registers (docs/experiments.md).
enum class Extra : std::uint8_t {
  none,
  softcap,  ///< softcap and nothing else
  all,      ///< softcap, bias, ALiBi, dropout, a softmax_scale of any sign
};

struct Kernel {
  Arch arch = Arch::portable;
  Pass pass = Pass::forward;
  Form form = Form::tile;
  Operand operand = Operand::f32;
  int block_m = 0;   ///< query rows a work item owns (forward; CPU tile: at most), or visits at a
                     ///< time (backward)
  int tile_m = 0;    ///< rows that meet a block of keys together (CPU tile: side by side in lanes;
                     ///< GPU: of a warpgroup, by mma.sync of a warp); divides block_m. Backward by
                     ///< mma.sync: keys of a warp; divides block_n
  int block_n = 0;   ///< keys a step takes (forward; GPU decode: of all warps), or a work item
                     ///< owns (backward)
  int split_n = 0;   ///< keys after which the forward may split; 0: never. A GPU: a part, where
                     ///< parts may not depend on the batch
  int lanes = 0;     ///< fp32 lanes of a vector; GPU: 0
  int head_dim = 0;  ///< GPU: the largest it takes; smaller ones are padded by the copy engine
  int head_dim_v = 0;  ///< GPU: the same of values
  int q_rows = 0;      ///< GPU: rows of a buffer of queries: block_m, or tile_m (forward: one for
                       ///< each warpgroup, so that the next tile's come while others are read)
  int q_stages = 0;    ///< GPU: such buffers in a ring; 0: one, or two of decoding rows
  Extra extra = Extra::none;  ///< GPU
  bool any_layout = false;  ///< GPU: threads load what the copy engine cannot address: any stride,
                            ///< alignment and head dim. Such a row has the extras, too
  Dtype cached = Dtype::f32;  ///< GPU decode: of k and v, where they are of 8 bits and widened to
                              ///< the operand, exactly; else f32. With qv: of v alone, which
                              ///< becomes fp16 where it meets weights
  bool qv = false;            ///< GPU decode: scores are q . k + qv . v, as nowhere else
  bool prefixes = false;      ///< GPU decode: what neighbours share is read once (core/prefixes.h)
  int stages = 0;  ///< GPU, mma.sync: buffers of keys, and as many of values; decode: of each warp;
                   ///< backward: of dO
  int blocks = 1;  ///< GPU: blocks of threads of a multiprocessor that registers suffice for
  int cluster = 1;  ///< GPU: blocks of threads that share a tile: each has its part of all columns,
                    ///< or of its keys (exchanges)

  friend constexpr bool operator==(const Kernel&, const Kernel&) = default;
};

/// GPU, backward: whether the two halves of those who multiply share the keys of a tile and each
/// has a role (sm90/backward_wide.h, mma/backward.h), not keys of its own: where dK and dV of a
/// warp's keys, or what extras need besides, do not fit the registers of one warp.
TESSERA_HD constexpr bool splits_roles(const Kernel& row) {
  constexpr int kWarpgroup = 4;  // warps that share tile_m where they do not multiply by mma.sync
  const int keys = row.stages > 0 ? row.tile_m : row.tile_m / kWarpgroup;
  return row.pass == Pass::backward &&
         (keys * (row.head_dim + row.head_dim_v) > 16 * 256 || row.extra == Extra::all);
}

/// GPU, backward by wgmma: whether the blocks of threads that share a tile have keys of their own,
/// and exchange dS, so that each sums half of dQ's columns over all keys.
TESSERA_HD constexpr bool exchanges(const Kernel& row) {
  return row.pass == Pass::backward && row.cluster > 1 && row.stages == 0 &&
         row.block_n > row.tile_m;
}

/// GPU, backward: whether several blocks of threads may share the keys of a tile, each with some of
/// the rows that see them (RowSteps).
TESSERA_HD constexpr bool shares_keys(const Kernel& row) {
  return row.pass == Pass::backward && row.lanes == 0 && row.stages == 0 && !exchanges(row);
}

/// GPU, backward: whether heads may begin with their early keys where dQ is summed in order
/// (WorkOrder::early): where somebody else adds than who multiplies.
TESSERA_HD constexpr bool begins_early(const Kernel& row) {
  return shares_keys(row) && !splits_roles(row);
}

/// GPU, forward: whether blocks of threads can take the next tile as they get free. Not in pages,
/// whose warps go from tile to tile each at its own pace.
TESSERA_HD constexpr bool takes_tiles(const Kernel& row) {
  return row.pass == Pass::forward && row.form == Form::tile && row.lanes == 0 && row.stages == 0 &&
         !row.any_layout && row.cluster == 1;
}

/// Whether all keys of a block share a scale where scores have 8 bits. It leaves registers for
/// larger tiles.
TESSERA_HD constexpr bool shares_scale(const Kernel& row) {
  return row.operand == Operand::e4m3 && row.extra == Extra::none &&
         ((row.head_dim == 128 && row.block_m == 192) ||
          (row.head_dim == 256 && row.block_n == 128));
}
/// Keys of a block that share a scale where scores have 8 bits: each scale takes registers.
TESSERA_HD constexpr int scaled_keys(const Kernel& row) {
  if (shares_scale(row)) return row.block_n;
  if (row.operand == Operand::e4m3) return 32;
  return row.block_n % 128 == 0 ? 128 : row.block_n % 64 == 0 ? 64 : 32;
}
/// Scores of a thread that a row of 8 bits weighs first: of fewer than all the others follow. Where
/// weights have 16 bits, parts are no faster.
TESSERA_HD constexpr int first_scores(const Kernel& row) {
  if (row.operand != Operand::e4m3) return row.block_n / 2;
  return row.head_dim == 64 ? 32 : 16;
}

/// Whether a GPU's decoding row widens keys and values of 8 bits, with qv values alone (S14).
TESSERA_HD constexpr bool widens(const Kernel& row) { return is_scaled(row.cached); }

/// Whether a row hides the keys of pages that a table skips (S13) as it comes to them.
TESSERA_HD constexpr bool hides_pages(const Kernel& row) { return row.qv; }

/// Keys that are multiplied at a time by a warp of a GPU's decoding row; of rows with qv by a
/// warpgroup.
TESSERA_HD constexpr int decode_tile_keys(const Kernel& row) { return row.qv ? row.block_n : 16; }

/// How often a GPU's decoding row makes the scores of a key at most: once for so many columns of
/// its value as a warp has registers for, where it has not for all. And of values so wide.
/// @{
TESSERA_HD constexpr int value_passes(const Kernel& row) {
  if (row.form != Form::decode || row.qv || row.lanes > 0) return 1;
  return row.head_dim / row.head_dim_v;
}
TESSERA_HD constexpr int value_passes(const Kernel& row, int head_dim_v) {
  return value_passes(row) == 1 ? 1 : ceil_div(head_dim_v, row.head_dim_v);
}
/// @}

/// Whether no build has the machine code of a row, which is then compiled when it is needed: of
/// head dims that few models have.
TESSERA_HD constexpr bool is_made_at_need(const Kernel& row) {
  return row.lanes == 0 && row.head_dim > 256;
}

/// Words of 16 bytes (core::PartWord) that a block of a GPU's decoding row leaves of an item: two
/// columns each; of rows with qv four, and a word of 8 bytes a row.
TESSERA_HD constexpr int part_words(const Kernel& row) {
  if (row.qv) return row.block_m * row.head_dim_v / 4 + row.block_m / 2;
  return row.block_m * row.head_dim_v / 2;
}

}  // namespace tessera::core
