// An append on a GPU: the launch of aux/append.h. Allocates nothing and waits for nothing.
#include "cuda/append.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda/backend.h"
#include "cuda/maps.h"
#include "cuda/rotary.h"
#include "cuda/target.h"
#include "plan/append.h"
#include "plan/text.h"

namespace tessera::cuda {
namespace {

/// A tensor's rows of `dim` columns, of which the first `rotary` are rotated by p's tables; sizes:
/// of from and to; stored: the type of `to`.
aux::CarriedRows carried(const AppendShape& s, const aux::AppendParams& p, const ConstTensor& from,
                         const RowSizes& from_sizes, const Tensor& to, const RowSizes& to_sizes,
                         Dtype stored, std::int64_t dim, std::int64_t rotary) {
  const std::int64_t size = size_of(s.dtype), stored_size = size_of(stored);
  aux::CarriedRows rows;
  rows.from = {from.data, strides_between(from, from_sizes)};
  rows.to = to.data;
  rows.to_strides = strides_between(to, to_sizes);
  // The second columns of pairs begin in the middle.
  const std::int64_t run = s.rotary && !s.rotary->interleaved ? rotary / 2 : rotary;
  const auto consist_of = [&](std::int64_t bytes) {
    const auto aligned = [&](const void* data, const core::Strides& strides, std::int64_t element) {
      return rows_aligned(data, element, {strides.batch, strides.seqlen, strides.head, dim, run},
                          static_cast<std::uint64_t>(bytes / size * element));
    };
    const std::int64_t entry = size_of(p.table_dtype), half = entry * (bytes / 2 / size);
    const auto has_halves = [&](const void* table, std::int64_t stride) {
      return rotary == 0 || rows_aligned(table, entry, {stride}, static_cast<std::uint64_t>(half));
    };
    return aligned(from.data, rows.from.strides, size) &&
           aligned(to.data, rows.to_strides, stored_size) && has_halves(p.cos, p.stride_cos) &&
           has_halves(p.sin, p.stride_sin);
  };
  std::int64_t bytes = aux::kMostPieceBytes;
  // What is quantised has no kernel for pieces of 8 bytes.
  const std::int64_t step = is_scaled(stored) ? 4 : 2;
  while (bytes > size && !consist_of(bytes)) bytes = core::max(bytes / step, size);
  rows.piece_bytes = static_cast<int>(bytes);
  rows.rotated = static_cast<int>(rotary * size / bytes);
  rows.plain = static_cast<int>((dim - rotary) * size / bytes);
  rows.heads = static_cast<int>(from_sizes.heads);
  rows.rotated_units = core::ceil_div(rows.rotated, 2);
  rows.plain_units = core::ceil_div(rows.plain, 2);
  const int head_units = rows.rotated_units + rows.plain_units;
  rows.head_units = core::Divisor(
      is_scaled(stored) ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(head_units)))
                        : head_units);
  const int groups = core::ceil_div(
      rows.heads, is_scaled(stored) ? aux::kRoundedHeads : aux::thread_heads(rows.piece_bytes));
  rows.row_units = core::Divisor(groups * rows.head_units.value());
  rows.rows = from_sizes.batch * from_sizes.seqlen;
  const int units = rows.row_units.value();
  rows.row_blocks = core::Divisor(core::ceil_div(units, aux::kAppendThreads));
  rows.block_rows = core::max(1, aux::kAppendThreads / units);
  rows.blocks = core::ceil_div<std::int64_t>(rows.rows, rows.block_rows) * rows.row_blocks.value();
  return rows;
}

aux::CarriedRows carried_new(const AppendShape& s, const aux::AppendParams& p,
                             const ConstTensor& from, const Tensor& to, const Scales& numbers,
                             const core::Scales& scales, std::int64_t dim, std::int64_t rotary) {
  if (s.rows_new() == 0) return {};
  const RowSizes fresh = {s.packed_new ? 1 : s.batch,
                          s.packed_new ? s.total_new : s.cache.seqlen_new, s.num_heads_k};
  const RowSizes cached = {s.entries(), s.entry_slots(), s.num_heads_k};
  aux::CarriedRows rows = carried(s, p, from, fresh, to, cached, s.stored_kv(), dim, rotary);
  rows.scales = scales;
  rows.written = numbers.data;
  rows.seqlen = core::Divisor(s.packed_new ? 0 : static_cast<int>(s.cache.seqlen_new));
  return rows;
}

aux::CarriedRows carried_q(const AppendShape& s, const aux::AppendParams& p,
                           const AppendTensors& t) {
  if (s.rows_q() == 0) return {};
  const RowSizes sizes = {s.packed ? 1 : s.batch, s.packed ? s.total_q : s.seqlen_q, s.num_heads};
  // In place the other columns stay as they are.
  const std::int64_t dim = t.q.data == t.q_out.data ? s.rotary->dim : s.head_dim;
  aux::CarriedRows rows = carried(s, p, t.q, sizes, t.q_out, sizes, s.dtype, dim, s.rotary->dim);
  rows.seqlen = core::Divisor(s.packed ? 0 : static_cast<int>(s.seqlen_q));
  return rows;
}

}  // namespace

aux::AppendParams append_params(const AppendShape& s, const AppendTensors& t) {
  aux::AppendParams p;
  p.places = append_of(s, t);
  if (s.rotary) set_tables(p, *s.rotary, t.rotary);
  p.dtype_kv = s.stored_kv();
  p.k = carried_new(s, p, t.k_new, t.k, t.k_scale, k_scales_of(s, t), s.head_dim,
                    s.rotary ? s.rotary->dim : 0);
  p.v = carried_new(s, p, t.v_new, t.v, t.v_scale, v_scales_of(s, t), s.head_dim_v, 0);
  p.q = carried_q(s, p, t);
  return p;
}

Status refusal(const AppendShape& s) {
  if (!s.quantizes() || s.rows_new() == 0) return {};
  for (const auto& [name, dim] :
       {std::pair{"head_dim", s.head_dim}, {"head_dim_v", s.head_dim_v}}) {
    if (dim <= aux::kMostRoundedColumns) continue;
    return Status::unsupported("append: " +
                               refused(name, dim,
                                       "GPUs quantise rows of up to " +
                                           std::to_string(aux::kMostRoundedColumns) + " columns"));
  }
  return {};
}

Status append(const AppendShape& shape, const AppendTensors& tensors, const Device& device,
              const Execution& execution) {
  return enqueue_on(device, execution, "append",
                    [&](const Queue& queue) { return append(shape, tensors, queue); });
}

Status append(const AppendShape& shape, const AppendTensors& tensors, const Queue& queue) {
  if (Status s = refusal(shape); !s) return s;
  const aux::AppendParams params = append_params(shape, tensors);
  const std::int64_t blocks = params.blocks();
  if (blocks == 0) return {};
  // Threads count in 31 bits, up to a block beyond the last row.
  constexpr std::int64_t kMost = INT32_MAX - aux::kAppendThreads;
  if (const std::int64_t most = std::max({params.k.rows, params.q.rows, blocks}); most > kMost) {
    return Status::device("append: " + std::to_string(most) + " rows or blocks of threads; up to " +
                          std::to_string(kMost) + " are one launch");
  }
  static_assert(static_cast<int>(Dtype::f16) == 2, "the kernels are numbered by type");
  const std::size_t quantizing = shape.quantizes() ? static_cast<std::size_t>(kPlainDtypes) : 0;
  return queue.launch_auxiliary(
      number_of(AuxiliaryKernel::append_f32) + quantizing + static_cast<std::size_t>(shape.dtype),
      blocks, &params);
}

}  // namespace tessera::cuda
