// Hopper's kernels as programs for NVRTC.
#pragma once

#include "cuda/architecture.h"

namespace tessera::cuda::sm90 {

/// What the backward pass does before and after its main kernel (backward_rows.h), the merge of
/// partial results (aux/combine.h), the append to a cache (aux/append.h, aux/append_quantizing.h),
/// quantising (aux/quantize.h), tiles of values that came in rows (aux/lay_values.h), pages that
/// are not skipped (aux/keep_pages.h) and prefixes that are shared (aux/find_prefixes.h), by its
/// place in kAuxiliary.
enum class AuxiliaryKernel : std::uint8_t {
  prepare_bf16,
  finish_bf16,
  prepare_f16,
  finish_f16,
  sum_sinks,
  begin_bias,
  finish_bias,
  combine_f32,
  combine_bf16,
  combine_f16,
  append_f32,
  append_bf16,
  append_f16,
  append_quantizing_f32,
  append_quantizing_bf16,
  append_quantizing_f16,
  quantize_f32,
  quantize_bf16,
  quantize_f16,
  quantize_usual_f32,
  quantize_usual_bf16,
  quantize_usual_f16,
  lay_values,
  keep_pages,
  find_prefixes,
};

inline constexpr Auxiliary kAuxiliary[] = {
    {"prepare_rows_bf16", "sm90::prepare_rows<Dtype::bf16>", "BackwardRowParams"},
    {"finish_rows_bf16", "sm90::finish_rows<Dtype::bf16>", "BackwardRowParams"},
    {"prepare_rows_f16", "sm90::prepare_rows<Dtype::f16>", "BackwardRowParams"},
    {"finish_rows_f16", "sm90::finish_rows<Dtype::f16>", "BackwardRowParams"},
    {"sum_sinks", "sm90::sum_sinks", "BackwardRowParams"},
    {"begin_bias", "sm90::begin_bias", "BackwardBiasParams"},
    {"finish_bias", "sm90::finish_bias", "BackwardBiasParams"},
    {"combine_f32", "aux::combine<Dtype::f32>", "aux::CombineParams", 4},
    {"combine_bf16", "aux::combine<Dtype::bf16>", "aux::CombineParams", 4},
    {"combine_f16", "aux::combine<Dtype::f16>", "aux::CombineParams", 4},
    {"append_f32", "aux::append<Dtype::f32>", "aux::AppendParams", 8, true},
    {"append_bf16", "aux::append<Dtype::bf16>", "aux::AppendParams", 8, true},
    {"append_f16", "aux::append<Dtype::f16>", "aux::AppendParams", 8, true},
    {"append_quantizing_f32", "aux::append_quantizing<Dtype::f32>", "aux::AppendParams", 8, true},
    {"append_quantizing_bf16", "aux::append_quantizing<Dtype::bf16>", "aux::AppendParams", 5, true},
    {"append_quantizing_f16", "aux::append_quantizing<Dtype::f16>", "aux::AppendParams", 5, true},
    {"quantize_f32", "aux::quantize<Dtype::f32, false>", "aux::QuantizeParams", 3, true},
    {"quantize_bf16", "aux::quantize<Dtype::bf16, false>", "aux::QuantizeParams", 3, true},
    {"quantize_f16", "aux::quantize<Dtype::f16, false>", "aux::QuantizeParams", 3, true},
    {"quantize_usual_f32", "aux::quantize<Dtype::f32, true>", "aux::QuantizeParams", 2, true},
    {"quantize_usual_bf16", "aux::quantize<Dtype::bf16, true>", "aux::QuantizeParams", 3, true},
    {"quantize_usual_f16", "aux::quantize<Dtype::f16, true>", "aux::QuantizeParams", 3, true},
    {"lay_values", "aux::lay_values", "aux::LayValuesParams", 8, true},
    {"keep_pages", "aux::keep_pages", "aux::KeepPagesParams", 8, true},
    {"find_prefixes", "aux::find_prefixes", "aux::FindPrefixesParams", 8, true},
};

extern const Architecture kArchitecture;

}  // namespace tessera::cuda::sm90
