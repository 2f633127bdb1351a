// Partial results: attention over parts of the keys, each computed by itself (S7), which combine()
// merges into attention over all of them.
#pragma once

#include <cstdint>

#include "tessera/tensors.hpp"

namespace tessera {

/// Most PartialResults::num_splits.
inline constexpr std::int64_t kMaxSplits = 65536;

/// The sizes of partial results, as a value without pointers.
struct PartialResults {
  Dtype dtype = Dtype::f32;     ///< of the parts' outputs
  Dtype dtype_o = Dtype::f32;   ///< of the merged one: any
  std::int64_t num_splits = 1;  ///< parts of a row
  std::int64_t batch = 1;       ///< sequences; packed: 1
  std::int64_t seqlen_q = 0;    ///< packed: total_q
  std::int64_t num_heads = 1;   ///< of queries
  std::int64_t head_dim_v = 0;  ///< of o

  /// Rows of the merged output.
  std::int64_t rows() const { return batch * seqlen_q * num_heads; }

  friend bool operator==(const PartialResults&, const PartialResults&) = default;
};

/// (num_splits, batch, seqlen_q, num_heads, head_dim_v): what a run over each part of the keys
/// wrote to o. Strides in elements, any; the last one is 1.
struct ConstPartialRows {
  const void* data = nullptr;  ///< the first element
  /// From one element of a dimension to the next.
  /// @{
  std::int64_t stride_split = 0;
  std::int64_t stride_batch = 0;
  std::int64_t stride_seqlen = 0;
  std::int64_t stride_head = 0;
  /// @}
};

/// An fp32 number for each of their rows: softmax_lse of each part, natural logarithm (S5). Strides
/// in elements, any.
struct ConstPartialLse {
  const float* data = nullptr;  ///< the first element
  /// From one element of a dimension to the next.
  /// @{
  std::int64_t stride_split = 0;
  std::int64_t stride_batch = 0;
  std::int64_t stride_seqlen = 0;
  std::int64_t stride_head = 0;
  /// @}
};

/// The merged softmax_lse.
struct Lse {
  float* data = nullptr;  ///< the first element; null: not written
  /// From one element of a dimension to the next.
  /// @{
  std::int64_t stride_batch = 0;
  std::int64_t stride_seqlen = 0;
  std::int64_t stride_head = 0;
  /// @}
};

/// What combine() reads and writes. Outputs must not overlap each other or the parts.
struct PartialTensors {
  ConstPartialRows o_parts;   ///< of type PartialResults::dtype
  ConstPartialLse lse_parts;  ///< -inf: the part gives nothing, and its output is not looked at
  Tensor o;                   ///< (batch, seqlen_q, num_heads, head_dim_v), of type dtype_o
  Lse softmax_lse;            ///< optional
};

}  // namespace tessera
