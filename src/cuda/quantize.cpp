// Quantising on a GPU: the launch of aux/quantize.h. Allocates nothing and waits for nothing.
#include "cuda/quantize.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "cuda/backend.h"
#include "cuda/maps.h"
#include "cuda/rotary.h"
#include "cuda/target.h"
#include "plan/quantize.h"
#include "plan/text.h"

namespace tessera::cuda {
namespace {

constexpr int kKeys = core::ValueTiles::kKeys;

/// Whether kUnit columns of all that a row needs come at once, by 16 bytes, and go at once, by 8.
bool is_whole(const aux::QuantizeParams& p, const aux::QuantizedRows& rows, std::int64_t size) {
  constexpr std::uint64_t kBytes = 16, kStored = 8;
  const core::Strides &from = rows.from.strides, &to = rows.to_strides;
  const auto numbers_are = [](const core::Scales& numbers) {
    return !numbers ||
           rows_aligned(numbers.data, 4, {numbers.stride_batch, numbers.stride_head}, kBytes);
  };
  bool whole = rows.dim % aux::kUnit == 0 &&
               rows_aligned(rows.from.data, size, {from.batch, from.seqlen, from.head}, kBytes) &&
               (rows.tiles || rows_aligned(rows.to, 1, {to.batch, to.seqlen, to.head}, kStored)) &&
               numbers_are(rows.off) && numbers_are(rows.dot) &&
               (rows.scales.by != Scaling::channel || numbers_are(rows.scales));
  if (!rows.turns) return whole;
  whole = whole && rows_aligned(p.signs, 4, {}, kBytes);
  if (p.rotary == 0) return whole;
  const std::int64_t run = p.interleaved ? p.rotary : p.rotary / 2, entry = size_of(p.table_dtype);
  return whole && run % aux::kUnit == 0 && rows_aligned(p.cos, entry, {p.stride_cos}, kBytes) &&
         rows_aligned(p.sin, entry, {p.stride_sin}, kBytes);
}

/// What all tensors are told alike. rows: what is told of one of them already.
void set_rows(aux::QuantizedRows& rows, const QuantizeShape& s, const aux::QuantizeParams& p,
              const ConstTensor& from, const Tensor& to, const Scales& numbers) {
  const Problem& problem = s.problem;
  const RowSizes sizes = row_sizes(problem, rows.queries);
  rows.from = {from.data, strides_between(from, sizes)};
  rows.to = to.data;
  rows.to_strides = strides_between(to, sizes);
  rows.written = numbers.data;
  rows.heads = static_cast<int>(sizes.heads);
  rows.lanes = 2;
  while (rows.lanes * aux::kThreadColumns < rows.dim) rows.lanes *= 2;
  const int at_once = aux::kQuantizeThreads / rows.lanes;
  const bool together = rows.scales.by == Scaling::block;
  if (!together && !rows.tiles) rows.side = std::gcd(rows.heads, at_once);
  rows.groups = core::Divisor(rows.heads / rows.side);
  for (int steps = aux::kFreeSteps; steps > 0; steps /= 2) {
    int count = steps * at_once / rows.side;
    if (together) count = rows.scales.block;
    if (rows.tiles) count = std::max(together ? rows.scales.block : 1, kKeys);
    rows.pieces = {rows.queries ? p.sequences.cu_seqlens_q : p.sequences.cu_seqlens_k,
                   static_cast<int>(rows.queries ? problem.seqlen_q : problem.seqlen_k),
                   static_cast<int>(problem.batch), count};
    rows.blocks =
        rows.pieces.count(rows.queries ? problem.total_q : problem.total_k) * rows.groups.value();
    if (together || rows.tiles || rows.blocks >= aux::kManyBlocks) break;
  }
  rows.row_pieces = core::Divisor(core::ceil_div(rows.dim, aux::kUnit));
  rows.whole = is_whole(p, rows, size_of(s.dtype));
  const bool own = p.interleaved || p.rotary == rows.lanes * aux::kThreadColumns;
  rows.direct = rows.whole && (!rows.turns || p.rotary == 0 || own);
  const core::Strides& out = rows.to_strides;
  rows.whole_pieces =
      rows.whole && rows_aligned(rows.to, 1, {out.batch, out.seqlen, out.head, rows.dim}, 16);
}

}  // namespace

Status refusal(const QuantizeShape& s, const QuantizeTensors& t) {
  const Problem& p = s.problem;
  constexpr std::int64_t kMost = 256;
  const auto refuse = [](const char* name, std::int64_t value, const std::string& text) {
    return Status::unsupported("quantize: " + refused(name, value, text));
  };
  const std::string columns = "GPUs quantise rows of up to " + std::to_string(kMost) + " columns";
  if ((has_q(s, t) || has_k(s, t)) && p.head_dim > kMost) {
    return refuse("head_dim", p.head_dim, columns);
  }
  if (!has_v(s, t)) return {};
  if (p.head_dim_v > kMost) return refuse("head_dim_v", p.head_dim_v, columns);
  const std::int64_t block = p.scales.block_v;
  const bool fits = p.scales.v != Scaling::block || block % kKeys == 0 || kKeys % block == 0;
  if (!p.v_tiles || fits) return {};
  return refuse("scales.block_v", block,
                "GPUs make v_tiles with blocks that divide 128 keys or are multiples of them");
}

aux::QuantizeParams quantize_params(const QuantizeShape& s, const QuantizeTensors& t) {
  const Problem& problem = s.problem;
  const Tensors results = results_of(t);
  aux::QuantizeParams p;
  p.sequences = sequences_of(problem, results);
  p.places = positions_of(s, t);
  p.hadamard = s.hadamard;
  p.signs = s.signs ? t.signs : nullptr;
  if (s.rotary) {
    set_tables(p, *s.rotary, t.rotary);
    p.rotary = static_cast<int>(s.rotary->dim);
  }
  const auto dim = static_cast<int>(problem.head_dim);
  if (has_q(s, t)) {
    p.q().queries = p.q().turns = true;
    p.q().dim = dim;
    p.q().dtype = problem.dtype;
    p.q().scales = q_scales_of(problem, results);
    p.q().heads_per_k = static_cast<int>(problem.group());
    p.q().dot = k_mean_of(s, t);
    p.q().shift = score_shift_of(problem, results);
    p.q().score_shift = problem.scales.score_shift ? t.score_shift.data : nullptr;
    set_rows(p.q(), s, p, t.q, t.q_out, t.q_scale);
  }
  if (has_k(s, t)) {
    p.k().turns = true;
    p.k().dim = dim;
    p.k().dtype = problem.dtype;
    p.k().scales = k_scales_of(problem, results);
    p.k().off = k_mean_of(s, t);
    set_rows(p.k(), s, p, t.k, t.k_out, t.k_scale);
  }
  if (has_v(s, t)) {
    p.v().dim = static_cast<int>(problem.head_dim_v);
    p.v().dtype = problem.stored_v();
    p.v().tiles = problem.v_tiles;
    p.v().scales = v_scales_of(problem, results);
    p.v().off = v_shift_of(problem, results);
    set_rows(p.v(), s, p, t.v, t.v_out, t.v_scale);
  }
  return p;
}

Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors, const Device& device,
                const Execution& execution) {
  return enqueue_on(device, execution, "quantize",
                    [&](const Queue& queue) { return quantize(shape, tensors, queue); });
}

Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors, const Queue& queue) {
  if (Status s = refusal(shape, tensors); !s) return s;
  const aux::QuantizeParams params = quantize_params(shape, tensors);
  const std::int64_t blocks = params.blocks();
  if (blocks == 0) return {};
  if (blocks > INT32_MAX) {
    return Status::device("quantize: " + std::to_string(blocks) + " blocks of threads; up to " +
                          std::to_string(INT32_MAX) + " are one launch");
  }
  static_assert(static_cast<int>(Dtype::f16) == 2, "the kernels are numbered by type");
  if (params.plain(shape.dtype)) {
    const auto kernel = shape.dtype == Dtype::bf16 ? AuxiliaryKernel::quantize_plain_bf16
                                                   : AuxiliaryKernel::quantize_plain_f16;
    return queue.launch_auxiliary(number_of(kernel), blocks, &params);
  }
  const std::size_t usual = params.usual() ? static_cast<std::size_t>(kPlainDtypes) : 0;
  return queue.launch_auxiliary(
      number_of(AuxiliaryKernel::quantize_f32) + usual + static_cast<std::size_t>(shape.dtype),
      blocks, &params);
}

}  // namespace tessera::cuda
