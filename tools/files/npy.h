// The .npy format, versions 1.0 to 3.0: a magic, a Python dictionary literal, one dense array.
// The parser takes untrusted bytes and allocates no more than their header's size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "files/entry.h"
#include "tessera/status.hpp"

namespace tessera::tools {

/// NumPy has no bf16: ml_dtypes saves it as '<V2', other writers as '<u2' or '|V2'.
enum class TwoBytes : std::uint8_t {
  refuse,  ///< such files say nothing of what they hold
  offer,   ///< refused too, and the user told of --u2-is-bf16
  bf16,    ///< the caller knows that they hold bf16
};

/// True if the bytes begin like a .npy file.
bool is_npy(std::span<const std::byte> bytes);

/// Describes the one array of a whole .npy file. Error texts name the byte or the field.
Result<Entry> parse_npy(std::span<const std::byte> bytes, TwoBytes two_bytes);

/// The bytes that precede the data, a multiple of 64. bf16 is written as ml_dtypes does ('<V2'):
/// NumPy reads it without ml_dtypes, and `.view(ml_dtypes.bfloat16)` gives the values.
std::string npy_header(Element element, std::span<const std::int64_t> shape);

}  // namespace tessera::tools
