// Tensors: the pointers and strides that go with a Problem. Strides are in elements; the stride of
// the last dimension is always 1 and therefore not written (S11).
#pragma once

#include <cstdint>

#include "tessera/problem.hpp"

namespace tessera {

/// A read-only (batch, seqlen, heads, head_dim) tensor; packed: (total, heads, head_dim), where
/// stride_batch is ignored.
struct ConstTensor {
  const void* data = nullptr;  ///< the first element
  /// From one element of a dimension to the next.
  /// @{
  std::int64_t stride_batch = 0;
  std::int64_t stride_seqlen = 0;
  std::int64_t stride_head = 0;
  /// @}
};

/// The same, written to. Must not overlap any other tensor.
struct Tensor {
  void* data = nullptr;  ///< the first element
  /// From one element of a dimension to the next.
  /// @{
  std::int64_t stride_batch = 0;
  std::int64_t stride_seqlen = 0;
  std::int64_t stride_head = 0;
  /// @}

  /// What one pass wrote the next one reads.
  operator ConstTensor() const {  // NOLINT(google-explicit-constructor)
    return {data, stride_batch, stride_seqlen, stride_head};
  }
};

/// A (batch, num_heads, seqlen_q, seqlen_k) additive bias. The stride of a dimension that BiasShape
/// does not store is ignored.
struct ConstBias {
  const void* data = nullptr;  ///< the first element
  /// From one element of a dimension to the next.
  /// @{
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
  std::int64_t stride_query = 0;
  std::int64_t stride_key = 0;
  /// @}
};

/// The gradient of a bias; same shape as the bias, strides of its own.
struct Bias {
  void* data = nullptr;  ///< the first element
  /// From one element of a dimension to the next.
  /// @{
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
  std::int64_t stride_query = 0;
  std::int64_t stride_key = 0;
  /// @}
};

/// fp32 numbers of the shape that a Scaling has: (batch, heads, ..), or (heads, ..) where sequences
/// are packed; the last dimension is contiguous. Of k and v by token: (batch, seqlen, heads) with
/// any strides, packed (total, heads), in a cache (rows, ..) or (num_pages, page_size,
/// num_heads_k). Of v by group the same, and a last dimension of groups.
struct ConstScales {
  const float* data = nullptr;  ///< the first number
  /// From one number of a dimension to the next; ignored where there is no such dimension.
  /// @{
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
  std::int64_t stride_seqlen = 0;  ///< of k and v by token or group
  /// @}
};

/// The same, to be written or read.
struct Scales {
  float* data = nullptr;  ///< the first number
  /// From one number of a dimension to the next; ignored where there is no such dimension.
  /// @{
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
  std::int64_t stride_seqlen = 0;  ///< of k and v by token
  /// @}

  /// What was written is read later.
  operator ConstScales() const {  // NOLINT(google-explicit-constructor)
    return {data, stride_batch, stride_head, stride_seqlen};
  }
};

/// Where the sequences of a cache lie and how long they are (S13). What is null is so for none.
struct CacheTensors {
  /// (batch), iff Problem has lengths. A negative one: the sequence is a no-op.
  const std::int32_t* seqlens = nullptr;
  /// (batch + 1) boundaries of new keys, iff lengths are `before` and queries are packed; of an
  /// append iff new rows are (append.hpp).
  const std::int32_t* cu_seqlens_new = nullptr;
  /// (rows or batch, at least seqlen_k / page_size rounded up) page numbers, iff paged. Those
  /// beyond a sequence's length are never read. One below 0: CacheShape::skips.
  const void* page_table = nullptr;
  std::int64_t stride_page_table = 0;     ///< from one row of page_table to the next
  const std::int32_t* index = nullptr;    ///< (batch) rows of the sequences, iff CacheShape::rows
  const std::int32_t* leftpad = nullptr;  ///< (batch) first slots, iff CacheShape::leftpad
};

/// Everything a run reads and writes. `required` depends on the Problem; run() checks. What a
/// forward writes and its backward only reads is one field with two names, the second one const:
/// who calls a backward needs no writable o and softmax_lse, and who calls both sets them once.
struct Tensors {
  /// Nothing.
  Tensors() : o(), softmax_lse(nullptr) {}

  ConstTensor q;  ///< (batch, seqlen_q, num_heads, head_dim)
  /// (batch, seqlen_k, num_heads_k, head_dim); a cache: (rows, ..), or (num_pages, page_size, ..)
  ConstTensor k;
  ConstTensor v;   ///< the same with head_dim_v, strides of its own
  ConstTensor qv;  ///< (batch, seqlen_q, num_heads, head_dim_v), iff Problem::qv
  /// (batch, seqlen_q, num_heads, head_dim_v).
  union {
    Tensor o;             ///< forward: written
    ConstTensor saved_o;  ///< backward: read
  };
  /// (batch, num_heads, seqlen_q) contiguous fp32, packed (num_heads, total_q); natural logarithm
  /// (S5).
  union {
    float* softmax_lse;              ///< forward: written unless null
    const float* saved_softmax_lse;  ///< backward: read, required
  };

  ConstBias bias;                       ///< required iff Problem::bias
  const float* alibi_slopes = nullptr;  ///< (num_heads) or (batch, num_heads), iff alibi (S6)
  const float* sink = nullptr;          ///< (num_heads), iff Problem::sink
  const std::int32_t* cu_seqlens_q = nullptr;  ///< (batch + 1), iff packed
  const std::int32_t* cu_seqlens_k = nullptr;  ///< (batch + 1), iff packed
  CacheTensors cache;                          ///< iff Problem::cache
  /// (batch, seqlen_q) contiguous, packed (total_q), iff Problem::tree: bit j of a query's says
  /// that it may see key seqlen_k - seqlen_q + j.
  const std::uint64_t* tree_mask = nullptr;
  /// Scales of q, k and v: each iff Problem::scales has them (S14).
  /// @{
  ConstScales q_scale;
  ConstScales k_scale;
  ConstScales v_scale;
  /// @}
  ConstScales score_shift;          ///< as of Scaling::token, iff ScaleShape::score_shift
  ConstScales v_shift;              ///< as of Scaling::channel, iff ScaleShape::v_shift
  std::uint64_t philox_seed = 0;    ///< dropout only (S8)
  std::uint64_t philox_offset = 0;  ///< dropout only (S8)

  // Backward.
  ConstTensor dout;                     ///< like o
  const float* dsoftmax_lse = nullptr;  ///< like softmax_lse; null: zero (S5)
  Tensor dq;                            ///< like q
  Tensor dk;                            ///< like k
  Tensor dv;                            ///< like v
  Bias dbias;                           ///< null: not computed
  float* dsink = nullptr;               ///< (num_heads); null: not computed
};

/// Whether a GPU needs the problem to be `unaligned` to take these tensors: an address of q, k, v,
/// qv, o or their gradients, or a stride of more than one element, is no multiple of 16 bytes, or
/// q, k, v or dout has one of 2^40 bytes or more, or one that is not positive. Tensors that are
/// null do not count.
TESSERA_API bool needs_unaligned(const Problem& problem, const Tensors& tensors);

}  // namespace tessera
