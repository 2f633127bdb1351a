// The .safetensors format: an 8-byte header length, a JSON header, then the tensors' bytes. The
// parser takes untrusted bytes; its memory grows with the header (at most 100 MB), never with what
// it claims.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "files/entry.h"
#include "tessera/status.hpp"

namespace tessera::tools {

/// Describes all tensors of a whole file, in the order of their bytes. As the format demands, they
/// must cover the data exactly: no overlap, no hole, no rest. Error texts name the tensor and the
/// field.
Result<std::vector<Entry>> parse_safetensors(std::span<const std::byte> bytes);

/// The bytes that precede the data, a multiple of 64, of tensors stored one after the other in the
/// given order (`offset` and `stored_type` are not read). Names must be distinct valid UTF-8.
Result<std::string> safetensors_header(std::span<const Entry> entries);

}  // namespace tessera::tools
