// Calls on caches of keys and values (S13): attention over one, and an append to one.
#pragma once

#include "view.h"

#include <optional>

#include "tessera/tessera.hpp"

namespace tessera::python {

/// The tensors of attention over a cache, in the order in which module.cpp gets them. The names are
/// those of `tessera.cached_attention`, which errors use.
struct CacheInputs {
  View q, k_cache, v_cache, o, lse, alibi_slopes, sink, cu_seqlens_q;
  View seqlens, cu_seqlens_new, page_table, cache_index, leftpad, tree_mask, k_scale, v_scale, qv;
};

/// What is not a tensor.
struct CacheOptions {
  std::int64_t max_seqlen_q = 0;  ///< packed only
  Lengths lengths = Lengths::full;
  std::int64_t seqlen_new = 0;
  std::optional<float> softmax_scale;
  float softcap = 0.0F;
  std::int64_t window_left = -1, window_right = -1, chunk = 0, sink_tokens = 0;
  bool batch_invariant = false, skip_pages = false;
  std::int64_t prefix_levels = 0;
};

/// Throws Raise(ValueError, NotImplementedError) if shapes, types or devices do not go together.
Problem problem_of(const CacheInputs& inputs, const CacheOptions& options);
Tensors tensors_of(const CacheInputs& inputs, const Problem& problem);

/// The tensors of an append, with the names of `tessera.append`.
struct AppendInputs {
  View k_new, v_new, k_cache, v_cache, q, q_out;
  View seqlens, cu_seqlens_new, page_table, cache_index, cu_seqlens_q, slot_mapping;
  View rotary_cos, rotary_sin, rotary_seqlens, rotary_positions, k_scale, v_scale;
};

/// What is not a tensor.
struct AppendOptions {
  Lengths lengths = Lengths::before;
  std::int64_t max_seqlen_q = 0, max_seqlen_new = 0;  ///< packed only
  bool rotary_interleaved = false, rotary_constant_q = false;
};

/// Tables of the rotary embedding of `rows`, a tensor of that name, type and head_dim. Throws
/// Raise(ValueError).
RotaryShape rotary_of(const View& cos, const View& sin, const View& rows, const char* name,
                      Dtype dtype, std::int64_t head_dim);

/// The same as tensors, and the positions that sequences begin at.
RotaryTensors rotary_tensors(const View& cos, const View& sin, const View& seqlens);

/// An append and the attention that follows it in one call: `rows` gets what it shares with `in`,
/// and `in` what follows from the append. The queries are rotated if there is rows.q_out.
void before_attention(AppendInputs& rows, AppendOptions& row_options, CacheInputs& in,
                      CacheOptions& options);

/// Throw as above.
AppendShape shape_of(const AppendInputs& inputs, const AppendOptions& options);
AppendTensors tensors_of(const AppendInputs& inputs, const AppendShape& shape);

}  // namespace tessera::python
