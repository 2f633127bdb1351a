// What a storage type is to the kernels: one description. Every switch here is complete, so a new
// type does not compile until each of them knows it; nothing becomes another type in silence.
#pragma once

#include "core/kernel.h"

namespace tessera::core {

static_assert(static_cast<int>(Dtype::i8) == kDtypes - 1);

/// Whose products are taken of a type's elements as they lie. A CPU widens those of 8 bits.
TESSERA_HD constexpr Operand operand_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return Operand::f32;
    case Dtype::bf16: return Operand::bf16;
    case Dtype::f16: return Operand::f16;
    case Dtype::e4m3: return Operand::e4m3;
    case Dtype::i8: return Operand::f32;
  }
  return Operand::f32;
}

/// The type of values as a row multiplies them, and of their weights.
TESSERA_HD constexpr Dtype dtype_of(Operand operand) {
  switch (operand) {
    case Operand::f32: return Dtype::f32;
    case Operand::bf16: return Dtype::bf16;
    case Operand::f16: return Dtype::f16;
    case Operand::e4m3: return Dtype::e4m3;
    case Operand::i8_bf16: return Dtype::bf16;
    case Operand::i8_f16: return Dtype::f16;
  }
  return Dtype::f32;
}

/// The same of queries and keys.
TESSERA_HD constexpr Dtype score_dtype_of(Operand operand) {
  const bool integers = operand == Operand::i8_bf16 || operand == Operand::i8_f16;
  return integers ? Dtype::i8 : dtype_of(operand);
}

/// Whether a GPU's row waits by itself for what was enqueued before it, and may be launched before
/// that is done: what is often short, or comes right behind kernels that it reads from.
TESSERA_HD constexpr bool waits_for_grids(const Kernel& row) {
  return row.form == Form::decode || is_scaled(score_dtype_of(row.operand));
}

/// Bytes of a row of the swizzled layout in which wgmma reads shared memory, and of the part of a
/// row that one wgmma multiplies.
inline constexpr int kSwizzleBytes = 128, kMultiplyBytes = 32;

/// Columns of a swizzled row.
TESSERA_HD constexpr int swizzled_columns(Dtype dtype) {
  return kSwizzleBytes / static_cast<int>(size_of(dtype));
}
/// Columns that one wgmma multiplies: its k.
TESSERA_HD constexpr int multiplied_columns(Dtype dtype) {
  return kMultiplyBytes / static_cast<int>(size_of(dtype));
}

}  // namespace tessera::core
