// Quantising: q, k and v of 16 or 32 bits become those of a problem in 8 bits (S14), in one pass.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/append.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// What is made, and of what, as a value without pointers.
///
/// A row of q goes through these steps, in fp32: rotary embedding; signs; Hadamard transform;
/// scale; cast. A row of k the same, but that `k_mean` is subtracted after its rotation; of v only
/// `v_shift` is subtracted, before it is scaled. q . k is that of the rows as they came up to the
/// cast, as signs and transform are the same for both and keep dot products.
struct QuantizeShape {
  /// The problem that the results are for: its sizes, types, scales, shifts and v_tiles. No cache.
  /// Where its v has 16 bits, v stays as it is, and there is none here.
  Problem problem;
  Dtype dtype = Dtype::bf16;          ///< of q, k and v as they come: f32, bf16 or f16
  std::optional<RotaryShape> rotary;  ///< of q and k, by their positions; none: nothing is rotated
  /// Columns of a block of the Hadamard transform, which is divided by its square root: a power of
  /// two up to 256 that divides head_dim; 0: none. It spreads an outlier over its block
  /// (QuIP, Chee et al. 2023; FlashAttention-3, Shah et al. 2024, section 3.3).
  int hadamard = 0;
  bool signs = false;  ///< some columns of q and k are negated before the transform

  friend bool operator==(const QuantizeShape&, const QuantizeShape&) = default;
};

/// What quantize() reads and writes. q, k and v may each be left out, input and output both null.
/// Outputs must not overlap each other or inputs.
struct QuantizeTensors {
  /// As in Tensors, of QuantizeShape::dtype.
  /// @{
  ConstTensor q;
  ConstTensor k;
  ConstTensor v;
  /// @}
  /// As in Tensors, of the problem's types; v_out in tiles iff v_tiles.
  /// @{
  Tensor q_out;
  Tensor k_out;
  Tensor v_out;
  /// @}
  /// Scales by token and by block are those that take the largest number of the row or block to the
  /// type's largest, and are written; scales by tensor, head and channel are given, and read.
  /// @{
  Scales q_scale;
  Scales k_scale;
  Scales v_scale;
  /// @}
  /// (batch, num_heads_k, head_dim) iff ScaleShape::score_shift: what is subtracted from every key
  /// of a sequence and head, such as its mean. Any vector is right.
  ConstScales k_mean;
  Scales score_shift;            ///< written: q . k_mean of every row of q
  ConstScales v_shift;           ///< read: what is subtracted from v
  const float* signs = nullptr;  ///< (head_dim), 1 or -1, iff QuantizeShape::signs; -1 negates
  const std::int32_t* cu_seqlens_q = nullptr;  ///< (batch + 1), iff packed
  const std::int32_t* cu_seqlens_k = nullptr;  ///< the same
  /// iff QuantizeShape::rotary. A sequence's keys have the positions from `seqlens` on, null: from
  /// 0; its queries are seqlen_k - seqlen_q positions further on, so that its last query is where
  /// its last key is. `positions` must be null.
  RotaryTensors rotary;
};

}  // namespace tessera
