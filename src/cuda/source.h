// Where a tensor lies.
#pragma once

#include <cstdint>

namespace tessera::cuda {

/// Elements between neighbours of a (batch, seqlen, heads, head_dim) tensor.
struct Strides {
  std::int64_t batch = 0, seqlen = 0, head = 0;
};

/// A tensor by its address: for rows that take any layout, and those who read single rows.
struct Source {
  const void* data = nullptr;
  Strides strides;
};

}  // namespace tessera::cuda
