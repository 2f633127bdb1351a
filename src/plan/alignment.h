// What Problem::unaligned means: which tensors a GPU's copy engine, and stores of 16 bytes, can
// address. Called by the GPU's launches; needs_unaligned() asks for all tensors at once.
#pragma once

#include <cstdint>

#include "tessera/tensors.hpp"

namespace tessera {

/// A tensor's dimensions but the innermost; of a packed one the rows of all sequences.
struct RowSizes {
  std::int64_t batch, seqlen, heads;

  bool empty() const { return batch == 0 || seqlen == 0; }
};

/// Of q, o, dout and dq, or of k, v, dk and dv.
RowSizes row_sizes(const Problem& p, bool queries);

/// Bytes; addresses and strides must be multiples.
inline constexpr std::int64_t kRowAlignment = 16;

/// Errors: invalid, unless every row of the tensor, of that type, begins at a multiple of 16 bytes.
/// The text names what does not.
Status check_aligned(const char* name, const ConstTensor& tensor, const Problem& p, Dtype dtype,
                     bool queries);

/// The same for the copy engine, whose strides are positive, and below 2^40 bytes.
Status check_copyable(const char* name, const ConstTensor& tensor, const Problem& p, Dtype dtype,
                      bool queries);

/// The same of v where it lies in tiles (S14), which bulk copies fetch.
Status check_tiles(const ConstTensor& v, const Problem& p);

}  // namespace tessera
