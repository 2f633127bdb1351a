// How rows of the catalog are called, in plans, tables and machine code.
#pragma once

#include <string>

#include "core/mma_shape.h"
#include "tessera/device.hpp"

namespace tessera {

inline const char* to_string(core::Operand operand) {
  switch (operand) {
    case core::Operand::f32: return "f32";
    case core::Operand::bf16: return "bf16";
    case core::Operand::f16: return "f16";
    case core::Operand::e4m3: return "e4m3";
    case core::Operand::i8_bf16: return "i8_bf16";
    case core::Operand::i8_f16: return "i8_f16";
  }
  return "?";
}

/// A row's name, e.g. "cpu.avx512.forward.decode.f32" or "sm90.forward.bf16.d128.128x128": the
/// largest head_dim it takes (192v128 where that of values differs), its tile, and ".q1" where a
/// row has but one buffer of queries; by mma.sync ".w4" where four warps have a tile's rows, or
/// backward its keys, ".w4x2" where four pairs of warps share them; ".pair" where two blocks of
/// threads share the tile. A decoding row that widens is called by what it reads, with qv by the
/// types of keys and of values.
inline std::string name_of(const core::Kernel& kernel) {
  const std::string pass = kernel.pass == Pass::forward ? ".forward" : ".backward";
  std::string operand = std::string(".") + to_string(kernel.operand);
  if (core::widens(kernel)) {
    const char* const cached = kernel.cached == Dtype::i8 ? "i8" : "e4m3";
    operand = kernel.qv ? operand + "_" + cached : std::string(".") + cached;
  }
  if (!is_gpu(kernel.arch)) {
    return std::string("cpu.") + to_string(kernel.arch) + pass +
           (kernel.form == core::Form::tile ? ".tile" : ".decode") + operand;
  }
  std::string name = to_string(kernel.arch) + pass +
                     (kernel.form == core::Form::decode ? ".decode" : "") + operand + ".d" +
                     std::to_string(kernel.head_dim);
  if (kernel.head_dim_v != kernel.head_dim) name += "v" + std::to_string(kernel.head_dim_v);
  name += "." + std::to_string(kernel.block_m) + "x" + std::to_string(kernel.block_n);
  if (kernel.qv) return name + ".qv";
  if (kernel.prefixes) return name + ".prefixes";
  if (kernel.form == core::Form::decode) return name;
  const bool forward = kernel.pass == Pass::forward;
  if ((forward || kernel.stages > 0) && kernel.q_stages == 1) name += ".q1";
  if (kernel.cluster > 1) name += ".pair";
  if (kernel.stages > 0) {
    name += ".w" + std::to_string((forward ? kernel.block_m : kernel.block_n) / kernel.tile_m);
    if (const int parts = core::mma_parts(kernel); parts > 1) name += "x" + std::to_string(parts);
    if (!forward && kernel.stages > 1) name += ".do2";
  }
  if (kernel.any_layout) return name + ".any";
  switch (kernel.extra) {
    case core::Extra::none: return name;
    case core::Extra::softcap: return name + ".softcap";
    case core::Extra::all: return name + ".extra";
  }
  return name;
}

}  // namespace tessera
