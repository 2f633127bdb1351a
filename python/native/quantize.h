// Quantising (S14): its tensors and numbers become a QuantizeShape and QuantizeTensors.
#pragma once

#include <utility>

#include "view.h"

#include "tessera/tessera.hpp"

namespace tessera::python {

/// The tensors, in the order in which module.cpp gets them. The names are those of
/// `tessera.quantize`, which errors use.
struct QuantizeInputs {
  View q, k, v, q_out, k_out, v_out;
  View q_scale, k_scale, v_scale;  ///< written or read, as QuantizeOptions says
  View k_mean, score_shift, v_shift, signs, cu_seqlens_q, cu_seqlens_k;
  View rotary_cos, rotary_sin, rotary_seqlens;

  /// q, or without one k or v, by its name: what the others are held against.
  std::pair<const char*, const View&> first() const;
};

/// What is not a tensor.
struct QuantizeOptions {
  bool q_given = false, k_given = false, v_given = false;  ///< scales that are read
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;         ///< packed only
  std::int64_t k_block = 0, v_block = 0;  ///< keys that share a scale; not looked at where given
  std::int64_t hadamard = 0;
  bool v_tiles = false, rotary_interleaved = false, rotary_constant_q = false;
};

/// Throw Raise(ValueError) if shapes, types or devices do not go together.
QuantizeShape shape_of(const QuantizeInputs& inputs, const QuantizeOptions& options);
QuantizeTensors tensors_of(const QuantizeInputs& inputs, const QuantizeShape& shape);

}  // namespace tessera::python
