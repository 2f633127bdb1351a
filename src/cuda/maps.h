// The copy engine's view of a tensor. Called by launch.cpp.
#pragma once

#include "cuda/ptx/tensor_map.h"
#include "tessera/problem.hpp"
#include "tessera/tensors.hpp"

namespace tessera::cuda {

/// What to do with a tensor that the copy engine cannot address; ends an error's text.
inline constexpr const char* kOrUnaligned = "; or plan the problem as unaligned";

/// Makes the map of q (`queries`) or k or v: boxes of 64 of its `dim` columns and `rows` rows,
/// zeros outside; with packed_heads > 1 rows are those of so many heads, side by side, and in the
/// map heads come before positions. `name` is the tensor's in errors: invalid (an address or stride
/// that the copy engine cannot take), device.
Status make_map(ptx::TensorMap& map, const char* name, const ConstTensor& tensor, const Problem& p,
                bool queries, std::int64_t dim, int rows, int packed_heads);

}  // namespace tessera::cuda
