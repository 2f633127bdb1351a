// What validations of problems, appends and partial results have in common. Errors: invalid; each
// names the argument, its value and what would be accepted.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "core/pages.h"
#include "tessera/append.hpp"
#include "tessera/problem.hpp"
#include "tessera/status.hpp"
#include "tessera/tensors.hpp"

namespace tessera {

/// The refusal of a number that does not lie in [low, high].
Status out_of_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high);

/// A number in [low, high].
inline Status check_range(const char* name, std::int64_t value, std::int64_t low,
                          std::int64_t high) {
  return value >= low && value <= high ? Status{} : out_of_range(name, value, low, high);
}

/// No tensor or workspace may need 2^62 elements or more, so that offsets fit int64 with room to
/// spare.
bool fits_offsets(std::initializer_list<std::int64_t> sizes);

/// The refusal of a null pointer.
Status missing(const char* name, const char* why);

/// "NAME[INDEX]".
std::string element(const char* name, std::int64_t index);

/// What a tensor's strides are compared with.
struct Shape {
  std::int64_t batch, seqlen, heads, dim;
};

/// One dimension of a tensor. A stride is read only if its dimension has more than one element.
struct Axis {
  const char* name;
  std::int64_t stride, size;
};

/// Inputs may overlap themselves (a stride of 0 broadcasts).
Status check_strides(const char* tensor, std::span<const Axis> axes);

/// Outputs may not: neighbours in any dimension are at least `least` elements apart.
Status check_apart(const char* tensor, std::span<const Axis> axes, std::int64_t least);

std::array<Axis, 3> axes_of(const ConstTensor& tensor, const Shape& shape, bool packed);

Status check_tensor(const char* name, const ConstTensor& tensor, const Shape& shape, bool packed);
Status check_output(const char* name, const Tensor& tensor, const Shape& shape, bool packed);

/// Ends the refusal of boundaries that are null.
inline constexpr const char* kNoOffsets = "packed problems need batch + 1 offsets";

/// Boundaries of packed sequences of which none is longer than `longest`.
Status check_cu_seqlens(const char* name, const std::int32_t* cu_seqlens, std::int64_t batch,
                        const char* total_name, std::int64_t total, const char* longest_name,
                        std::int64_t longest);

/// A scaling that a tensor of that type may have.
Status check_among(const std::string& field, Dtype dtype, Scaling scaling,
                   std::initializer_list<Scaling> accepted);

/// A tensor's scales, or a shift, of the shape that a Scaling has; used: somebody looks at them.
Status check_numbers(const char* name, const ConstScales& numbers, Scaling scaling,
                     const Problem& p, bool used);

/// A rotary embedding of rows of that type and length.
Status check_rotary(const RotaryShape& rotary, Dtype dtype, std::int64_t head_dim);

/// Of its tables.
Status check_rotary_strides(const RotaryShape& shape, const RotaryTensors& tables);

/// Positions [first, first + count) are in the tables. name, value: of what decides on them.
Status check_positions(const RotaryShape& rotary, const std::string& name, std::int64_t value,
                       std::int64_t first, std::int64_t count);

/// The sizes of a cache to which at most so many keys a sequence are new.
Status check_cache_shape(const CacheShape& cache, std::int64_t most_new);

/// The row that a sequence has, where cache.index names it.
Status check_row(const core::Cache& cache, int batch);

/// The page in a row's column.
Status check_page(const core::Pages& pages, int row, int column);

}  // namespace tessera
