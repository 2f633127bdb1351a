// A call from Python: its tensors and numbers become a Problem and Tensors, are planned once, and
// run.
#pragma once

#include "view.h"

#include <array>
#include <optional>

#include "tessera/tessera.hpp"

namespace tessera::python {

/// The tensors of a call, in the order in which module.cpp gets them. The names are those of
/// `tessera.attention`, which errors use.
struct Inputs {
  View q, k, v, o, softmax_lse, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k;
  View qv;  ///< forward only
  View dout, dsoftmax_lse, dq, dk, dv, dbias, dsink;
};

/// What is not a tensor.
struct Options {
  Pass pass = Pass::forward;
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;  ///< packed only
  std::optional<float> softmax_scale;
  float softcap = 0.0F;
  std::int64_t window_left = -1, window_right = -1;
  bool top_left = false;
  float dropout_p = 0.0F;
  std::uint64_t seed = 0, offset = 0;
  bool deterministic = false, batch_invariant = false;
};

struct ScaleInputs;

/// Throws Raise(ValueError, NotImplementedError) if shapes, types or devices do not go together.
/// scales: of q, k and v of 8 bits; null: these are of 16 or 32.
Problem problem_of(const Inputs& inputs, const Options& options,
                   const ScaleInputs* scales = nullptr);
/// Without scales, which scaled.h adds.
Tensors tensors_of(const Inputs& inputs, const Options& options, const Problem& problem);

/// What `keep` is the dropout mask of. Throws Raise(ValueError) if it cannot hold one.
Problem problem_of_mask(const View& keep, float dropout_p);

/// The tensors of a merge of partial results. The names are those of `tessera.combine`.
struct PartialInputs {
  View o_parts, lse_parts, o, lse;
};

/// Throw Raise(ValueError) if shapes, types or devices do not go together.
PartialResults results_of(const PartialInputs& inputs);
PartialTensors tensors_of(const PartialInputs& inputs);

/// The processor that the tensors lie on, told by the first one. Throws Raise(RuntimeError: no
/// driver, no kernels for it).
Device device_of(const View& q, const char* name = "q");

/// The plan for a problem there, made once. Throws as `check`.
Plan plan_for(const Problem& problem, const Device& device);

}  // namespace tessera::python
