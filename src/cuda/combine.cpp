// Merging partial results on a GPU: the launch of aux/combine.h. Allocates nothing and waits for
// nothing.
#include <algorithm>
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/combine.h"
#include "cuda/maps.h"
#include "cuda/target.h"

namespace tessera::cuda {
namespace {

/// The fewest lanes that hold a row.
int lanes_of(std::int64_t head_dim) {
  std::int64_t lanes = 4;
  while (lanes < 32 && lanes * aux::kLaneColumns < head_dim) lanes *= 2;
  return static_cast<int>(lanes);
}

}  // namespace

aux::CombineParams combine_params(const PartialResults& results, const PartialTensors& t) {
  // Strides of dimensions of one element may be anything.
  const auto stride = [](std::int64_t size, std::int64_t given) { return size > 1 ? given : 0; };
  const auto strides_of = [&](const auto& tensor) {
    return core::Strides{stride(results.batch, tensor.stride_batch),
                         stride(results.seqlen_q, tensor.stride_seqlen),
                         stride(results.num_heads, tensor.stride_head)};
  };
  aux::CombineParams p;
  p.o_parts = {t.o_parts.data, strides_of(t.o_parts)};
  p.lse_parts = {t.lse_parts.data, strides_of(t.lse_parts)};
  p.o_split = stride(results.num_splits, t.o_parts.stride_split);
  p.lse_split = stride(results.num_splits, t.lse_parts.stride_split);
  p.o = t.o.data;
  p.o_strides = strides_of(t.o);
  p.softmax_lse = t.softmax_lse.data;
  p.lse_strides = strides_of(t.softmax_lse);
  p.rows = results.rows();
  p.seqlen = results.seqlen_q;
  p.heads = static_cast<int>(results.num_heads);
  p.splits = static_cast<int>(results.num_splits);
  p.head_dim = static_cast<int>(results.head_dim_v);
  p.lanes = lanes_of(results.head_dim_v);
  p.dtype_o = results.dtype_o;
  const core::Strides& from = p.o_parts.strides;
  p.parts_aligned =
      rows_aligned(p.o_parts.data, size_of(results.dtype),
                   {p.o_split, from.batch, from.seqlen, from.head, results.head_dim_v}, 16);
  const core::Strides& to = p.o_strides;
  const std::int64_t size = size_of(results.dtype_o);
  p.o_aligned = rows_aligned(p.o, size, {to.batch, to.seqlen, to.head, results.head_dim_v},
                             4 * static_cast<std::uint64_t>(size));
  return p;
}

Status combine(const PartialResults& results, const PartialTensors& tensors, const Device& device,
               const Execution& execution) {
  return enqueue_on(device, execution, "combine",
                    [&](const Queue& queue) { return combine(results, tensors, queue); });
}

Status combine(const PartialResults& results, const PartialTensors& tensors, const Queue& queue) {
  const aux::CombineParams params = combine_params(results, tensors);
  if (params.rows == 0) return {};
  static_assert(static_cast<int>(Dtype::f16) == 2, "the kernels are numbered by type");
  return queue.launch_auxiliary(
      number_of(AuxiliaryKernel::combine_f32) + static_cast<std::size_t>(results.dtype),
      std::min<std::int64_t>(params.blocks(), INT32_MAX), &params);
}

}  // namespace tessera::cuda
