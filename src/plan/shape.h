// Sizes of a problem that both the choice of its pieces and their cost follow.
#pragma once

#include "core/kernel.h"
#include "tessera/device.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// Blocks of threads of a GPU's row that the device has at once.
std::int64_t resident_blocks(const core::Kernel& row, const Device& device);

/// Query rows of one key/value head of the longest sequence, all heads of the group together.
std::int64_t rows_per_head_k(const Problem& problem);

/// Visible (query, key) pairs of the longest sequence, from at most 64 sampled queries.
std::int64_t visible_pairs(const Problem& problem);

/// Bytes of a key and its value, of one head.
inline std::int64_t key_and_value_bytes(const Problem& problem) {
  return problem.head_dim * size_of(problem.stored_k()) +
         problem.head_dim_v * size_of(problem.stored_v());
}

}  // namespace tessera
