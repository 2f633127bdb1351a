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
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,     256,       256,     16,       0, core::Extra::all},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,    128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,    128,      0,    0,     128,       128,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     192,       128,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     192,       192,     64,       3, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     256,       256,     64,       2, core::Extra::none},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     128,       128,     64,       2, core::Extra::all},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     128,       128,     64,       2, core::Extra::all,     true},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     256,       256,     64,       1, core::Extra::all},
  {Arch::sm90, Pass::backward, core::Form::tile, core::Operand::bf16,     64,    64,     64,      0,    0,     256,       256,     64,       1, core::Extra::all,     true},
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
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     96,      0,    0,     192,       128,    128,       2, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     64,      0,    0,     192,       192,    128,       1, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     64,      0,    0,     256,       256,    128,       1, core::Extra::none},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,      64,        64,    128,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,    128,      0,    0,     128,       128,    128,       2, core::Extra::softcap},
  {Arch::sm90, Pass::forward, core::Form::tile, core::Operand::e4m3,     128,    64,     64,      0,    0,     256,       256,    128,       1, core::Extra::softcap},
};
// Decoding over caches of 8 bits, which are widened to fp16; q and o are of bf16 or fp16. Each of these is two rows: e4m3,
// and the same for i8.
inline constexpr core::Kernel kCacheRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra          any_layout cached
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all, false, Dtype::e4m3},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all, false, Dtype::e4m3},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::f16,   16,    16,     64,    512,    0,     256,       256,     16,       0, core::Extra::all, false, Dtype::e4m3},
};
// Decoding of latent attention: values are keys, too. Each of these is two rows: bf16, and the same for fp16.
inline constexpr core::Kernel kLatentRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra              any_layout cached   qv
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,      64,       512,     16,       2, core::Extra::none, false, Dtype::f32, true},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  32,    32,     64,    512,    0,      64,       512,     32,       1, core::Extra::none, false, Dtype::f32, true},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  64,    64,     64,    512,    0,      64,       512,     64,       1, core::Extra::none, false, Dtype::f32, true},
};
// The same where values are of 8 bits beside keys of q's type. Each of these is two rows, too.
inline constexpr core::Kernel kLatentCacheRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra              any_layout cached   qv
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,      64,       512,     16,       2, core::Extra::none, false, Dtype::e4m3, true},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  32,    32,     64,    512,    0,      64,       512,     32,       1, core::Extra::none, false, Dtype::e4m3, true},
};
// Decoding over pages that neighbouring sequences share; up to 64 of their rows side by side, where registers hold the
// queries. Each of these is two rows: bf16, and the same for fp16.
inline constexpr core::Kernel kPrefixRows[] = {
  // arch       pass           form                operand          block_m tile_m block_n split_n lanes head_dim head_dim_v q_rows q_stages extra          any_layout cached   qv     prefixes
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  64,    16,     64,    512,    0,      64,        64,     16,       0, core::Extra::all, false, Dtype::f32, false, true},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  64,    16,     64,    512,    0,     128,       128,     16,       0, core::Extra::all, false, Dtype::f32, false, true},
  {Arch::sm90, Pass::forward, core::Form::decode, core::Operand::bf16,  16,    16,     64,    512,    0,     256,       256,     16,       0, core::Extra::all, false, Dtype::f32, false, true},
};
// clang-format on

/// All rows, in the order of the tables.
struct Catalog {
  using value_type = core::Kernel;
  static constexpr unsigned kCpu = sizeof kCpuRows / sizeof kCpuRows[0];
  static constexpr unsigned kGpu = sizeof kGpuRows / sizeof kGpuRows[0];
  static constexpr unsigned kInteger = sizeof kIntegerRows / sizeof kIntegerRows[0];
  static constexpr unsigned kEightBit = sizeof kEightBitRows / sizeof kEightBitRows[0];

  static constexpr unsigned kCache = sizeof kCacheRows / sizeof kCacheRows[0];
  static constexpr unsigned kLatent = sizeof kLatentRows / sizeof kLatentRows[0];
  static constexpr unsigned kLatentCache = sizeof kLatentCacheRows / sizeof kLatentCacheRows[0];
  static constexpr unsigned kPrefix = sizeof kPrefixRows / sizeof kPrefixRows[0];

  core::Kernel rows[kCpu + 2 * kGpu + kEightBit + 2 * kInteger + 2 * kCache + 2 * kLatent +
                    2 * kLatentCache + 2 * kPrefix] = {};

  constexpr Catalog() {
    core::Kernel* row = rows;
    for (const core::Kernel& one : kCpuRows) *row++ = one;
    for (const core::Kernel& one : kGpuRows) {
      for (const core::Operand operand : {core::Operand::bf16, core::Operand::f16}) {
        *row = one;
        row++->operand = operand;
      }
    }
    for (const core::Kernel& one : kEightBitRows) *row++ = one;
    for (const core::Kernel& one : kIntegerRows) {
      for (const core::Operand operand : {core::Operand::i8_bf16, core::Operand::i8_f16}) {
        *row = one;
        row++->operand = operand;
      }
    }
    for (const core::Kernel& one : kCacheRows) {
      for (const Dtype cached : {Dtype::e4m3, Dtype::i8}) {
        *row = one;
        row++->cached = cached;
      }
    }
    for (const core::Kernel& one : kLatentRows) {
      for (const core::Operand operand : {core::Operand::bf16, core::Operand::f16}) {
        *row = one;
        row++->operand = operand;
      }
    }
    for (const core::Kernel& one : kLatentCacheRows) {
      for (const core::Operand operand : {core::Operand::bf16, core::Operand::f16}) {
        *row = one;
        row++->operand = operand;
      }
    }
    for (const core::Kernel& one : kPrefixRows) {
      for (const core::Operand operand : {core::Operand::bf16, core::Operand::f16}) {
        *row = one;
        row++->operand = operand;
      }
    }
  }
  constexpr const core::Kernel* begin() const { return rows; }
  constexpr const core::Kernel* end() const { return rows + size(); }
  constexpr unsigned size() const { return sizeof rows / sizeof rows[0]; }
  constexpr const core::Kernel& operator[](unsigned i) const { return rows[i]; }
};
inline constexpr Catalog kCatalog;

}  // namespace tessera
