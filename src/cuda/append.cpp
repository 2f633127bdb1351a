// An append on a GPU: the launch of aux/append.h. Allocates nothing and waits for nothing.
#include "cuda/append.h"

#include <algorithm>
#include <cstdint>

#include "cuda/backend.h"
#include "cuda/maps.h"
#include "cuda/target.h"
#include "plan/append.h"

namespace tessera::cuda {
namespace {

/// Strides of dimensions of one element may be anything.
core::Strides strides_between(const ConstTensor& tensor, const RowSizes& sizes) {
  return {sizes.batch > 1 ? tensor.stride_batch : 0, sizes.seqlen > 1 ? tensor.stride_seqlen : 0,
          sizes.heads > 1 ? tensor.stride_head : 0};
}

/// A tensor's rows of `dim` columns, of which the first `rotary` are rotated; sizes: of from and
/// to.
aux::CarriedRows carried(const AppendShape& s, const ConstTensor& from, const RowSizes& from_sizes,
                         const Tensor& to, const RowSizes& to_sizes, std::int64_t dim,
                         std::int64_t rotary) {
  const std::int64_t size = size_of(s.dtype), columns = kRowAlignment / size;
  aux::CarriedRows rows;
  rows.from = {from.data, strides_between(from, from_sizes)};
  rows.to = to.data;
  rows.to_strides = strides_between(to, to_sizes);
  rows.heads = core::Divisor(static_cast<int>(from_sizes.heads));
  const auto aligned = [&](const void* data, const core::Strides& strides) {
    return rows_aligned(data, size, {strides.batch, strides.seqlen, strides.head, dim, rotary},
                        kRowAlignment);
  };
  // The second columns of pairs begin in the middle.
  const std::int64_t run = s.rotary && !s.rotary->interleaved ? rotary / 2 : rotary;
  rows.wide = aligned(from.data, rows.from.strides) && aligned(to.data, rows.to_strides) &&
              run % columns == 0;
  const std::int64_t piece = rows.wide ? columns : 1;
  rows.rotated = static_cast<int>(rotary / piece);
  rows.plain = static_cast<int>((dim - rotary) / piece);
  rows.head_units = core::Divisor(rows.rotated_units() + rows.plain_units());
  return rows;
}

aux::CarriedRows carried_new(const AppendShape& s, const ConstTensor& from, const Tensor& to,
                             std::int64_t dim, std::int64_t rotary) {
  if (s.rows_new() == 0) return {};
  const RowSizes fresh = {s.packed_new ? 1 : s.batch,
                          s.packed_new ? s.total_new : s.cache.seqlen_new, s.num_heads_k};
  const RowSizes cached = {s.entries(), s.entry_slots(), s.num_heads_k};
  aux::CarriedRows rows = carried(s, from, fresh, to, cached, dim, rotary);
  rows.rows = s.rows_new();
  rows.seqlen = core::Divisor(s.packed_new ? 0 : static_cast<int>(s.cache.seqlen_new));
  return rows;
}

aux::CarriedRows carried_q(const AppendShape& s, const AppendTensors& t) {
  if (s.rows_q() == 0) return {};
  const RowSizes sizes = {s.packed ? 1 : s.batch, s.packed ? s.total_q : s.seqlen_q, s.num_heads};
  // In place the other columns stay as they are.
  const std::int64_t dim = t.q.data == t.q_out.data ? s.rotary->dim : s.head_dim;
  aux::CarriedRows rows = carried(s, t.q, sizes, t.q_out, sizes, dim, s.rotary->dim);
  rows.rows = s.rows_q();
  rows.seqlen = core::Divisor(s.packed ? 0 : static_cast<int>(s.seqlen_q));
  return rows;
}

}  // namespace

aux::AppendParams append_params(const AppendShape& s, const AppendTensors& t) {
  aux::AppendParams p;
  p.places = append_of(s, t);
  p.k = carried_new(s, t.k_new, t.k, s.head_dim, s.rotary ? s.rotary->dim : 0);
  p.v = carried_new(s, t.v_new, t.v, s.head_dim_v, 0);
  p.q = carried_q(s, t);
  if (!s.rotary) return p;
  p.cos = t.rotary.cos;
  p.sin = t.rotary.sin;
  const bool several = s.rotary->positions > 1;
  p.stride_cos = several ? t.rotary.stride_cos : 0;
  p.stride_sin = several ? t.rotary.stride_sin : 0;
  p.positions = s.rotary->positions;
  p.table_dtype = s.rotary->dtype;
  p.interleaved = s.rotary->interleaved;
  const std::int64_t size = size_of(s.rotary->dtype);
  p.tables_aligned = rows_aligned(p.cos, size, {p.stride_cos}, kRowAlignment) &&
                     rows_aligned(p.sin, size, {p.stride_sin}, kRowAlignment);
  return p;
}

Status append(const AppendShape& shape, const AppendTensors& tensors, const Device& device,
              const Execution& execution) {
  return enqueue_on(device, execution, "append", [&](const Target& target, const Queue& queue) {
    return append(shape, tensors, target.append, queue);
  });
}

Status append(const AppendShape& shape, const AppendTensors& tensors, std::size_t kernels,
              const Queue& queue) {
  const aux::AppendParams params = append_params(shape, tensors);
  const std::int64_t blocks = params.blocks();
  if (blocks == 0) return {};
  static_assert(static_cast<int>(Dtype::f16) == 2, "the kernels are numbered by type");
  return queue.launch_auxiliary(kernels + static_cast<std::size_t>(shape.dtype),
                                std::min<std::int64_t>(blocks, INT32_MAX), &params);
}

}  // namespace tessera::cuda
