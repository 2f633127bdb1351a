// The scales of 8-bit tensors (S14): which elements share one follows from their shapes.
#pragma once

#include "call.h"

namespace tessera::python {

/// What a call on tensors of 8 bits has beside Inputs. The names are those of
/// `tessera.scaled_attention`, which errors use.
struct ScaleInputs {
  View q_scale, k_scale, v_scale, score_shift, v_shift;
  std::int64_t k_block = 0, v_block = 0;  ///< keys that share a scale; 0: it is not by block
};

/// The types of q, k, v and o. Throws Raise(ValueError) if they do not go together.
void read_types(const Inputs& inputs, Problem& problem);

/// Throws Raise(ValueError) if one is missing, or of no shape that the tensor may have.
ScaleShape scale_shape(const ScaleInputs& scales, const Inputs& inputs, const Problem& problem);

void add_scales(const ScaleInputs& scales, const Problem& problem, Tensors& tensors);

}  // namespace tessera::python
