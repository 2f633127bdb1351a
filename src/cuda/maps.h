// A problem and its tensors as kernels are told of them: the copy engine's maps, addresses and
// strides, and what the parameters of both passes have in common. Called by the passes' launches.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/philox.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/source.h"
#include "plan/alignment.h"
#include "plan/plan.h"

namespace tessera::cuda {

/// Makes the map of a tensor of queries or of keys: boxes of 128 bytes of its `dim` columns and
/// `rows` rows, zeros outside; with row_heads > 1 rows are those of so many heads, side by side,
/// and in the map heads come before positions. `name` is the tensor's in errors: invalid (an
/// address or stride that the copy engine cannot take), device.
Status make_map(ptx::TensorMap& map, const char* name, const ConstTensor& tensor, const Problem& p,
                Dtype dtype, bool queries, std::int64_t dim, int rows, int row_heads);

/// Strides of dimensions of one element, which may be anything, are 0.
core::Strides strides_between(const ConstTensor& tensor, const RowSizes& sizes);

/// between: with strides_between, so that rows which do not exist are at a row that does.
/// @{
Source source_of(const ConstTensor& tensor);
Source source_between(const ConstTensor& tensor, const RowSizes& sizes);
/// @}

/// Whether every row begins and ends at a multiple of so many bytes. size: of an element; strides:
/// all of the tensor's, and the columns of a row.
bool rows_aligned(const void* data, std::int64_t size, std::initializer_list<std::int64_t> strides,
                  std::uint64_t bytes);

/// Fills in what kernels of both passes are told alike: sizes, mask, and what stands between
/// products and weights.
template <typename Params>
void set_problem(Params& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  params.sequences = sequences_of(p, t);
  if constexpr (requires { params.cache; }) params.cache = cache_of(plan, t);
  if constexpr (requires { params.mask; }) {
    params.mask = mask_rules_of(p, t);
  } else {
    params.window = window_of(p);
    params.work = plan.work;
  }
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.score = plan.score;
  if constexpr (requires { params.dropout; }) {
    params.dropout = core::make_dropout(p.dropout_p, t.philox_seed, t.philox_offset);
  }
  if constexpr (requires { params.extras; }) {
    params.extras.alibi_slopes = p.alibi == PerHead::none ? nullptr : t.alibi_slopes;
    params.extras.alibi_batch = p.alibi == PerHead::batch_heads ? p.num_heads : 0;
    if (!p.bias) return;
    params.extras.bias = t.bias.data;
    params.extras.bias_dtype = p.bias->dtype;
    params.extras.bias_strides = strides_of(*p.bias, t.bias);
  }
}

/// The same for a forward pass: its outputs and its sink, too.
template <typename Params>
void set_forward(Params& params, const PlanData& plan, const Tensors& t) {
  params.o = t.o.data;
  params.o_strides = strides_of(t.o);
  params.softmax_lse = t.softmax_lse;
  params.lse_head = lse_head_of(plan.problem);
  params.sink = plan.problem.sink ? t.sink : nullptr;
  set_problem(params, plan, t);
}

}  // namespace tessera::cuda
