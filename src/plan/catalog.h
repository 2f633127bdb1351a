// The catalog: every kernel, one row each. Planner, kernels, tests, docs and command line read this
// table; a kernel that is not a row does not exist.
#pragma once

#include <initializer_list>

#include "core/kernel.h"

namespace tessera {

// clang-format off
inline constexpr core::Kernel kCpuRows[] = {
  // arch               pass            form                operand             block_m tile_m block_n split_n lanes
  {Arch::portable,    Pass::forward,  core::Form::tile,   core::Operand::f32,     64,     8,    128,   4096,    4},
  {Arch::portable,    Pass::forward,  core::Form::decode, core::Operand::f32,     16,    16,     64,   1024,    4},
  {Arch::portable,    Pass::backward, core::Form::tile,   core::Operand::f32,     48,     8,    120,      0,    4},
  {Arch::avx2,        Pass::forward,  core::Form::tile,   core::Operand::f32,    512,    16,    128,   4096,    8},
  {Arch::avx2,        Pass::forward,  core::Form::decode, core::Operand::f32,     16,    16,     64,   1024,    8},
  {Arch::avx2,        Pass::backward, core::Form::tile,   core::Operand::f32,     48,    16,    120,      0,    8},
  {Arch::avx512,      Pass::forward,  core::Form::tile,   core::Operand::f32,    512,    32,    128,   4096,   16},
  {Arch::avx512,      Pass::forward,  core::Form::decode, core::Operand::f32,     16,    16,     64,   1024,   16},
  {Arch::avx512,      Pass::backward, core::Form::tile,   core::Operand::f32,     64,    32,    128,      0,   16},
  {Arch::avx512_bf16, Pass::forward,  core::Form::tile,   core::Operand::bf16,   512,    32,    256,   4096,   16},
  {Arch::avx512_bf16, Pass::forward,  core::Form::decode, core::Operand::bf16,    16,    16,     64,   1024,   16},
  {Arch::avx512_bf16, Pass::backward, core::Form::tile,   core::Operand::bf16,   128,    32,    128,      0,   16},
};

// Each of these is two rows: bf16, and the same for fp16.
inline constexpr core::Kernel kGpuRows[] = {
  // arch       pass           form              operand            block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra                any_layout
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     192,    64,    128,      0,    0,      64,        64,    192,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,    128,      0,    0,      96,        96,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     192,    64,     80,      0,    0,      96,        96,    192,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,    128,      0,    0,     128,       128,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,     128,       128,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     192,    64,     80,      0,    0,     128,       128,    192,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,    128,      0,    0,     192,       128,     64,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     96,      0,    0,     192,       192,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,     256,       256,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,     256,       256,    128,       1, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     192,    64,     96,      0,    0,      64,        64,    192,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,    128,      0,    0,     128,       128,    128,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,     256,       256,     64,       3, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,      64,        64,    128,       2, core::Extra::all},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,     128,       128,    128,       2, core::Extra::all},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,     192,       128,    128,       2, core::Extra::all},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     32,      0,    0,     256,       256,    128,       2, core::Extra::all},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,      64,        64,    128,       2, core::Extra::all,     true},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     64,      0,    0,     128,       128,    128,       2, core::Extra::all,     true},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    64,     32,      0,    0,     256,       256,    128,       2, core::Extra::all,     true},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,    128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,    128,      0,    0,     128,       128,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     192,       128,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     192,       192,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     256,       256,     64,       2, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,    128,      0,    0,     256,       256,     64,       2, core::Extra::none,   false, Dtype::f32, false,   false,      0,     1,      2},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     128,       128,     64,       2, core::Extra::all},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     128,       128,     64,       2, core::Extra::all,     true},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     256,       256,     64,       1, core::Extra::all},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     256,       256,     64,       1, core::Extra::all,     true},
};

// Kernels by mma.sync. A warp has tile_m rows of queries (backward: keys): 32, which halves what a product reads of the
// others, or 16, which makes more warps of a tile. Of wide values warps share rows (core::mma_parts). Each of these is two
// rows: bf16, and the same for fp16.
inline constexpr core::Kernel kMmaRows[] = {
  // arch       pass           form              operand            block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra            any    cached      qv     prefixes stages blocks
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    32,     64,      0,    0,      64,        64,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    2,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    32,     64,      0,    0,      96,        96,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    2,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    32,     64,      0,    0,     128,       128,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    2,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    32,     32,      0,    0,     128,       128,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    2,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,     128,       128,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    32,     64,      0,    0,     192,       128,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,     192,       128,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,     192,       192,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,     256,       256,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    32,     64,      0,    0,     256,       256,    128,       0, core::Extra::none, false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       0, core::Extra::none, false, Dtype::f32, false, false,    1,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    32,     64,      0,    0,      64,        64,    128,       0, core::Extra::softcap, false, Dtype::f32, false, false,    2,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,     128,       128,    128,       0, core::Extra::softcap, false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       0, core::Extra::softcap, false, Dtype::f32, false, false,    1,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,      64,        64,    128,       0, core::Extra::all,     false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,     128,       128,    128,       0, core::Extra::all,     false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       0, core::Extra::all,     false, Dtype::f32, false, false,    1,      2},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,      64,        64,    128,       0, core::Extra::all,     true,  Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,     128,    16,     64,      0,    0,     128,       128,    128,       0, core::Extra::all,     true,  Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::forward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       0, core::Extra::all,     true,  Dtype::f32, false, false,    1,      2},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    32,    128,      0,    0,      64,        64,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      2},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,    128,      0,    0,      64,        64,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    32,    128,      0,    0,     128,       128,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    32,    128,      0,    0,     128,       128,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,    128,      0,    0,     128,       128,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      32,    16,    128,      0,    0,     128,       128,     32,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     192,       128,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      32,    16,     64,      0,    0,     192,       128,     32,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     192,       192,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     192,       192,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      32,    16,     64,      0,    0,     192,       192,     32,       2, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       2, core::Extra::none,    false, Dtype::f32, false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       1, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      32,    16,     64,      0,    0,     256,       256,     32,       1, core::Extra::none,    false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     128,       128,     64,       1, core::Extra::all,     false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       1, core::Extra::all,     false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      32,    16,     64,      0,    0,     256,       256,     32,       1, core::Extra::all,     false, Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     128,       128,     64,       1, core::Extra::all,     true,  Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      64,    16,     64,      0,    0,     256,       256,     64,       1, core::Extra::all,     true,  Dtype::f32, false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile, core::Operand::bf16,      32,    16,     64,      0,    0,     256,       256,     32,       1, core::Extra::all,     true,  Dtype::f32, false, false,    1,      1},
};

// Scores of 8 bits, weights and values of 16. Each of these is two rows: bf16, and the same for fp16.
inline constexpr core::Kernel kIntegerRows[] = {
  // arch       pass           form              operand            block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  192,    64,    128,      0,    0,      64,        64,    192,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  128,    64,    128,      0,    0,     128,       128,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  192,    64,     64,      0,    0,     128,       128,    192,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  128,    64,     96,      0,    0,     192,       192,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  128,    64,     64,      0,    0,     256,       256,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  128,    64,    128,      0,    0,     128,       128,    128,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::i8_bf16,  128,    64,     64,      0,    0,     256,       256,    128,       2, core::Extra::softcap},
};

// Each of these is one row.
inline constexpr core::Kernel kEightBitRows[] = {
  // arch       pass           form              operand            block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     192,    64,    128,      0,    0,      64,        64,    192,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,      96,        96,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,     128,       128,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     192,    64,     96,      0,    0,     128,       128,    192,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     96,      0,    0,     192,       128,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     64,      0,    0,     192,       192,     64,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     64,      0,    0,     256,       256,     64,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,     256,       256,     64,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,     128,       128,    128,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     64,      0,    0,     256,       256,     64,       2, core::Extra::softcap},
};
// Decoding. Memory answers Hopper after some 0.8 us, in which a multiprocessor takes 30 KB: so many are in stages. Narrow
// heads need more blocks: there is less to a tile, so latencies of its instructions count. Each of these is two rows: bf16,
// and the same for fp16.
inline constexpr core::Kernel kDecodeRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra            any    cached       qv     prefixes stages blocks
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 4, 3},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 3, 2},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,     256,       256,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 3, 1},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::bf16, 16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 4, 3},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::bf16, 16,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 3, 2},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::bf16, 16,    16,     32,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 4, 2},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::bf16, 16,    16,     32,    512,    0,     256,       256,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 4, 1},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::bf16, 16,    16,     16,    512,    0,     256,       256,     16,       0, core::Extra::all,  false, Dtype::f32, false, false, 5, 1},
};
// The same over caches of 8 bits, which are widened to fp16; q and o are of bf16 or fp16. Each of these is two rows: e4m3,
// and the same for i8.
inline constexpr core::Kernel kCacheRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra            any    cached       qv     prefixes stages blocks
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false, 4, 3},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false, 6, 2},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     64,    512,    0,     256,       256,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false, 6, 1},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::f16,  16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false, 4, 3},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::f16,  16,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false, 4, 2},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::f16,  16,    16,     32,    512,    0,     256,       256,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false, 4, 1},
};
// Decoding of latent attention: values are keys, too. Each of these is two rows: bf16, and the same for fp16.
inline constexpr core::Kernel kLatentRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra            any    cached       qv     prefixes stages blocks
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,      64,       512,     16,       2, core::Extra::none, false, Dtype::f32, true, false, 0, 1},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  32,    32,     64,    512,    0,      64,       512,     32,       1, core::Extra::none, false, Dtype::f32, true, false, 0, 1},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  64,    64,     64,    512,    0,      64,       512,     64,       1, core::Extra::none, false, Dtype::f32, true, false, 0, 1},
};
// The same where values are of 8 bits beside keys of q's type. Each of these is two rows, too.
inline constexpr core::Kernel kLatentCacheRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra            any    cached       qv     prefixes stages blocks
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,      64,       512,     16,       2, core::Extra::none, false, Dtype::e4m3, true, false, 0, 1},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  32,    32,     64,    512,    0,      64,       512,     32,       1, core::Extra::none, false, Dtype::e4m3, true, false, 0, 1},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  64,    64,     64,    512,    0,      64,       512,     64,       1, core::Extra::none, false, Dtype::e4m3, true, false, 0, 1},
};
// Decoding over pages that neighbouring sequences share; up to 64 of their rows side by side, where registers hold the
// queries. Each of these is two rows: bf16, and the same for fp16.
inline constexpr core::Kernel kPrefixRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra            any    cached       qv     prefixes stages blocks
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  64,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all,  false, Dtype::f32, false, true, 4, 2},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  64,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::f32, false, true, 3, 2},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,     256,       256,     16,       0, core::Extra::all,  false, Dtype::f32, false, true, 3, 1},
};
// Head dims from 264 to 512, both passes, and decoding of them: no build has their machine code, which is compiled when it is
// needed. Each of these is two rows: bf16, and the same for fp16.
inline constexpr core::Kernel kWideRows[] = {
  // arch       pass            form              operand             block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra           any    cached       qv     prefixes stages blocks cluster
  {Arch::sm90, Pass::forward,  core::Form::tile,   core::Operand::bf16, 128,    64,     80,      0,    0,     384,       384,    128,       1, core::Extra::none,    false, Dtype::f32,  false, false,    0,      1,     2},
  {Arch::sm90, Pass::forward,  core::Form::tile,   core::Operand::bf16, 128,    64,     64,      0,    0,     512,       512,    128,       1, core::Extra::none,    false, Dtype::f32,  false, false,    0,      1,     2},
  {Arch::sm90, Pass::forward,  core::Form::tile,   core::Operand::bf16, 128,    64,     64,      0,    0,     512,       512,    128,       1, core::Extra::softcap, false, Dtype::f32,  false, false,    0,      1,     2},
  {Arch::sm90, Pass::forward,  core::Form::tile,   core::Operand::bf16, 128,    64,     32,      0,    0,     512,       512,    128,       2, core::Extra::all,     false, Dtype::f32,  false, false,    0,      1,     2},
  {Arch::sm90, Pass::forward,  core::Form::tile,   core::Operand::bf16,  64,    16,     32,      0,    0,     512,       512,     64,       0, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm90, Pass::forward,  core::Form::decode, core::Operand::bf16,  16,    16,     32,    512,    0,     512,       512,     16,       0, core::Extra::all,  false, Dtype::f32,  false, false,    3,      1},
  {Arch::sm90, Pass::backward, core::Form::tile,   core::Operand::bf16,  64,    64,     64,      0,    0,     384,       384,     64,       2, core::Extra::none,    false, Dtype::f32,  false, false,    0,      1,     2},
  {Arch::sm90, Pass::backward, core::Form::tile,   core::Operand::bf16,  64,    64,     64,      0,    0,     512,       512,     64,       2, core::Extra::none,    false, Dtype::f32,  false, false,    0,      1,     2},
  {Arch::sm90, Pass::backward, core::Form::tile,   core::Operand::bf16,  64,    64,     64,      0,    0,     512,       512,     64,       1, core::Extra::all,     false, Dtype::f32,  false, false,    0,      1,     2},
  {Arch::sm90, Pass::backward, core::Form::tile,   core::Operand::bf16,  32,    32,     32,      0,    0,     512,       512,     32,       2, core::Extra::all,  true,  Dtype::f32,  false, false,    2,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  64,    16,     64,      0,    0,     384,       384,     64,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  32,    16,     32,      0,    0,     384,       384,     32,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  64,    32,     64,      0,    0,     512,       512,     64,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  64,    16,     32,      0,    0,     512,       512,     64,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  32,    16,     32,      0,    0,     512,       512,     32,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  64,    16,     32,      0,    0,     512,       512,     64,       0, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  64,    16,     32,      0,    0,     512,       512,     64,       0, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  32,    16,     32,      0,    0,     512,       512,     32,       0, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::tile,   core::Operand::bf16,  32,    16,     32,      0,    0,     512,       512,     32,       0, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::forward,  core::Form::decode, core::Operand::bf16,  16,    16,     32,    512,    0,     512,       512,     16,       0, core::Extra::all,  false, Dtype::f32,  false, false,    2,      1},
  {Arch::sm80, Pass::forward,  core::Form::decode, core::Operand::bf16,  16,    16,     16,    512,    0,     512,       512,     16,       0, core::Extra::all,  false, Dtype::f32,  false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  32,    32,     32,      0,    0,     384,       384,     32,       2, core::Extra::none, false, Dtype::f32,  false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  16,    32,     32,      0,    0,     384,       384,     16,       2, core::Extra::none, false, Dtype::f32,  false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  32,    32,     32,      0,    0,     512,       512,     32,       2, core::Extra::none, false, Dtype::f32,  false, false,    2,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  32,    32,     32,      0,    0,     512,       512,     32,       2, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  16,    32,     32,      0,    0,     512,       512,     16,       2, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  32,    32,     32,      0,    0,     512,       512,     32,       2, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  16,    32,     32,      0,    0,     512,       512,     16,       2, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  32,    32,     32,      0,    0,     512,       512,     32,       2, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm80, Pass::backward, core::Form::tile,   core::Operand::bf16,  16,    32,     32,      0,    0,     512,       512,     16,       2, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
};
// The same of caches of 8 bits: each of these is two rows, e4m3 and i8.
inline constexpr core::Kernel kWideCacheRows[] = {
  // arch       pass           form              operand             block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra        any    cached       qv     prefixes stages blocks
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     32,    512,    0,     512,       512,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false,    5,      1},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     32,    512,    0,     512,       128,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false,    5,      1},
  {Arch::sm80, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     16,    512,    0,     512,       128,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false,    5,      1},
};
// Turing, whose blocks have 64 KB, in fp16 alone. Without cp.async a copy is done when the thread goes on, so nothing is
// gained by a second buffer; where two blocks of threads fit, one multiplies while the other copies.
inline constexpr core::Kernel kTuringRows[] = {
  // arch       pass            form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra       any    cached       qv     prefixes stages blocks
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,     128,    32,     48,      0,    0,      64,        64,    128,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      2},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,     128,    32,     32,      0,    0,     128,       128,    128,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,      64,    16,     16,      0,    0,     256,       256,     64,       0, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,      64,    16,     64,      0,    0,      64,        64,     64,       0, core::Extra::all,  false, Dtype::f32,  false, false,    1,      2},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,      64,    16,     32,      0,    0,     128,       128,     64,       0, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,      64,    16,     16,      0,    0,     256,       256,     64,       0, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,      64,    16,     64,      0,    0,      64,        64,     64,       0, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      2},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,      64,    16,     32,      0,    0,     128,       128,     64,       0, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::forward,  core::Form::tile,   core::Operand::f16,      64,    16,     16,      0,    0,     256,       256,     64,       0, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::backward, core::Form::tile,   core::Operand::f16,      64,    16,    128,      0,    0,      64,        64,     64,       2, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::backward, core::Form::tile,   core::Operand::f16,      32,    16,     64,      0,    0,     128,       128,     32,       2, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::backward, core::Form::tile,   core::Operand::f16,      32,    16,     32,      0,    0,     256,       256,     32,       1, core::Extra::none, false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::backward, core::Form::tile,   core::Operand::f16,      32,    16,     64,      0,    0,     128,       128,     32,       1, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::backward, core::Form::tile,   core::Operand::f16,      32,    16,     16,      0,    0,     256,       256,     32,       1, core::Extra::all,  false, Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::backward, core::Form::tile,   core::Operand::f16,      32,    16,     64,      0,    0,     128,       128,     32,       1, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::backward, core::Form::tile,   core::Operand::f16,      32,    16,     16,      0,    0,     256,       256,     32,       1, core::Extra::all,  true,  Dtype::f32,  false, false,    1,      1},
  {Arch::sm75, Pass::forward,  core::Form::decode, core::Operand::f16,      16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all,  false, Dtype::f32,  false, false,    3,      1},
  {Arch::sm75, Pass::forward,  core::Form::decode, core::Operand::f16,      16,    16,     32,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::f32,  false, false,    3,      1},
  {Arch::sm75, Pass::forward,  core::Form::decode, core::Operand::f16,      16,    16,     16,    512,    0,     256,       128,     16,       0, core::Extra::all,  false, Dtype::f32,  false, false,    3,      1},
};
// Decoding over caches of 8 bits there: each of these is two rows, e4m3 and i8.
inline constexpr core::Kernel kTuringCacheRows[] = {
  // arch       pass            form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra       any    cached       qv     prefixes stages blocks
  {Arch::sm75, Pass::forward,  core::Form::decode, core::Operand::f16,      16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false,    4,      1},
  {Arch::sm75, Pass::forward,  core::Form::decode, core::Operand::f16,      16,    16,     32,    512,    0,     128,       128,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false,    4,      1},
  {Arch::sm75, Pass::forward,  core::Form::decode, core::Operand::f16,      16,    16,     16,    512,    0,     256,       128,     16,       0, core::Extra::all,  false, Dtype::e4m3, false, false,    5,      1},
};
// clang-format on

template <unsigned kCount>
constexpr unsigned count(const core::Kernel (&)[kCount]) {
  return kCount;
}

/// All rows, in the order of the tables.
struct Catalog {
  using value_type = core::Kernel;

  core::Kernel rows[count(kCpuRows) + 2 * count(kGpuRows) + 2 * count(kMmaRows) +
                    2 * count(kDecodeRows) + count(kEightBitRows) + 2 * count(kIntegerRows) +
                    2 * count(kCacheRows) + 2 * count(kLatentRows) + 2 * count(kLatentCacheRows) +
                    2 * count(kPrefixRows) + 2 * count(kWideRows) + 2 * count(kWideCacheRows) +
                    count(kTuringRows) + 2 * count(kTuringCacheRows)] = {};

  constexpr Catalog() {
    using core::Operand;
    core::Kernel* row = rows;
    const auto add = [&row](const auto& table) {
      for (const core::Kernel& one : table) *row++ = one;
    };
    const auto add_both = [&row](const auto& table, auto member, auto first, auto second) {
      for (const core::Kernel& one : table) {
        for (const auto value : {first, second}) {
          *row = one;
          row++->*member = value;
        }
      }
    };
    add(kCpuRows);
    add_both(kGpuRows, &core::Kernel::operand, Operand::bf16, Operand::f16);
    add_both(kMmaRows, &core::Kernel::operand, Operand::bf16, Operand::f16);
    add_both(kDecodeRows, &core::Kernel::operand, Operand::bf16, Operand::f16);
    add(kEightBitRows);
    add_both(kIntegerRows, &core::Kernel::operand, Operand::i8_bf16, Operand::i8_f16);
    add_both(kCacheRows, &core::Kernel::cached, Dtype::e4m3, Dtype::i8);
    add_both(kLatentRows, &core::Kernel::operand, Operand::bf16, Operand::f16);
    add_both(kLatentCacheRows, &core::Kernel::operand, Operand::bf16, Operand::f16);
    add_both(kPrefixRows, &core::Kernel::operand, Operand::bf16, Operand::f16);
    add_both(kWideRows, &core::Kernel::operand, Operand::bf16, Operand::f16);
    add_both(kWideCacheRows, &core::Kernel::cached, Dtype::e4m3, Dtype::i8);
    add(kTuringRows);
    add_both(kTuringCacheRows, &core::Kernel::cached, Dtype::e4m3, Dtype::i8);
  }
  constexpr const core::Kernel* begin() const { return rows; }
  constexpr const core::Kernel* end() const { return rows + size(); }
  constexpr unsigned size() const { return sizeof rows / sizeof rows[0]; }
  constexpr const core::Kernel& operator[](unsigned i) const { return rows[i]; }
};
inline constexpr Catalog kCatalog;

}  // namespace tessera
