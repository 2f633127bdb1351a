// Conversions between what a file holds and what attention takes: floating-point types among each
// other (round to nearest, ties to even), and sequence boundaries to int32.
#pragma once

#include <cstdint>
#include <vector>

#include "files/tensor_file.h"
#include "tessera/status.hpp"
#include "tessera/types.hpp"

namespace tessera::tools {

/// The element type that stores a dtype; files of 8-bit tensors and their scales are not read.
constexpr Element element_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return Element::f32;
    case Dtype::bf16: return Element::bf16;
    case Dtype::f16: return Element::f16;
    case Dtype::e4m3:
    case Dtype::i8: break;
  }
  return Element::f32;
}

/// The tensor itself if it already is of that type, else a converted copy. Values too large for the
/// type become infinite. Refuses integers.
Result<FileTensor> as_dtype(const FileTensor& tensor, Dtype dtype);

/// The values of an i32 or i64 tensor of one dimension, such as cu_seqlens; refuses what does not
/// fit.
Result<std::vector<std::int32_t>> as_int32(const FileTensor& tensor);

/// One value in 16 bits, from any wider type.
std::uint16_t to_f16(double value);
std::uint16_t to_bf16(double value);
float from_f16(std::uint16_t bits);
float from_bf16(std::uint16_t bits);

}  // namespace tessera::tools
