// Kernels that are not rows of the catalog: those that every architecture has (aux/), and how they
// become a program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera::cuda {

/// A kernel that is not a row of the catalog.
struct Auxiliary {
  const char* name;    ///< of its function in the cubin
  const char* call;    ///< the device function, in tessera::cuda
  const char* params;  ///< its parameter's type
  int resident = 8;    ///< blocks of a multiprocessor that registers must suffice for
  /// It waits by itself for what was enqueued before it, and may be launched before that is done.
  bool begins_early = false;
};

/// The merge of partial results (aux/combine.h), the append to a cache (aux/append.h,
/// aux/append_quantizing.h), quantising (aux/quantize.h), tiles of values that came in rows
/// (aux/lay_values.h), pages that are not skipped (aux/keep_pages.h), prefixes that are shared
/// (aux/find_prefixes.h) and what is around a backward pass (aux/backward_rows.h), by its place in
/// kAuxiliary. What an architecture has besides comes after.
enum class AuxiliaryKernel : std::uint8_t {
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
  quantize_plain_bf16,
  quantize_plain_f16,
  lay_values,
  keep_pages,
  find_prefixes,
  prepare_rows_bf16,
  prepare_rows_f16,
  sum_sinks,
  begin_bias,
  finish_bias,
};

inline constexpr std::array kAuxiliary = std::to_array<Auxiliary>({
    {"combine_f32", "aux::combine<Dtype::f32>", "aux::CombineParams", 4},
    {"combine_bf16", "aux::combine<Dtype::bf16>", "aux::CombineParams", 4},
    {"combine_f16", "aux::combine<Dtype::f16>", "aux::CombineParams", 4},
    {"append_f32", "aux::append<Dtype::f32>", "aux::AppendParams", 8, true},
    {"append_bf16", "aux::append<Dtype::bf16>", "aux::AppendParams", 8, true},
    {"append_f16", "aux::append<Dtype::f16>", "aux::AppendParams", 8, true},
    {"append_quantizing_f32", "aux::append_quantizing<Dtype::f32>", "aux::AppendParams", 8, true},
    {"append_quantizing_bf16", "aux::append_quantizing<Dtype::bf16>", "aux::AppendParams", 5, true},
    {"append_quantizing_f16", "aux::append_quantizing<Dtype::f16>", "aux::AppendParams", 5, true},
    {"quantize_f32", "aux::quantize<Dtype::f32, aux::Known::nothing>", "aux::QuantizeParams", 2,
     true},
    {"quantize_bf16", "aux::quantize<Dtype::bf16, aux::Known::nothing>", "aux::QuantizeParams", 3,
     true},
    {"quantize_f16", "aux::quantize<Dtype::f16, aux::Known::nothing>", "aux::QuantizeParams", 3,
     true},
    {"quantize_usual_f32", "aux::quantize<Dtype::f32, aux::Known::usual>", "aux::QuantizeParams", 2,
     true},
    {"quantize_usual_bf16", "aux::quantize<Dtype::bf16, aux::Known::usual>", "aux::QuantizeParams",
     3, true},
    {"quantize_usual_f16", "aux::quantize<Dtype::f16, aux::Known::usual>", "aux::QuantizeParams", 3,
     true},
    {"quantize_plain_bf16", "aux::quantize<Dtype::bf16, aux::Known::plain>", "aux::QuantizeParams",
     5, true},
    {"quantize_plain_f16", "aux::quantize<Dtype::f16, aux::Known::plain>", "aux::QuantizeParams", 5,
     true},
    {"lay_values", "aux::lay_values", "aux::LayValuesParams", 8, true},
    {"keep_pages", "aux::keep_pages", "aux::KeepPagesParams", 8, true},
    {"find_prefixes", "aux::find_prefixes", "aux::FindPrefixesParams", 8, true},
    {"prepare_rows_bf16", "aux::prepare_rows<Dtype::bf16>", "aux::BackwardRowParams"},
    {"prepare_rows_f16", "aux::prepare_rows<Dtype::f16>", "aux::BackwardRowParams"},
    {"sum_sinks", "aux::sum_sinks", "aux::BackwardRowParams"},
    {"begin_bias", "aux::begin_bias", "aux::BackwardBiasParams"},
    {"finish_bias", "aux::finish_bias", "aux::BackwardBiasParams"},
});

inline constexpr int kAuxiliaryThreads = 128;  ///< of a block of each

constexpr std::size_t number_of(AuxiliaryKernel kernel) { return static_cast<std::size_t>(kernel); }

/// Of an architecture's own kernels that make dQ of its sums: behind kAuxiliary. Where rows by
/// mma.sync are but some of its rows, those of their sums come after, and what makes dK and dV of
/// theirs where blocks of threads share keys.
/// @{
enum class FinishKernel : std::uint8_t { bf16, f16, mma_bf16, mma_f16, keys_bf16, keys_f16 };
constexpr std::size_t number_of(FinishKernel kernel) {
  return kAuxiliary.size() + static_cast<std::size_t>(kernel);
}
template <std::size_t kCount>
constexpr auto with_finish(const char* const (&calls)[kCount]) {
  constexpr const char* kNames[] = {"finish_rows_bf16",     "finish_rows_f16",
                                    "finish_mma_rows_bf16", "finish_mma_rows_f16",
                                    "finish_keys_bf16",     "finish_keys_f16"};
  constexpr std::size_t kKeys = static_cast<std::size_t>(FinishKernel::keys_bf16);
  std::array<Auxiliary, kAuxiliary.size() + kCount> all{};
  for (std::size_t i = 0; i < kAuxiliary.size(); ++i) all[i] = kAuxiliary[i];
  for (std::size_t i = 0; i < kCount; ++i) {
    if (i < kKeys) {
      all[kAuxiliary.size() + i] = {kNames[i], calls[i], "aux::BackwardRowParams"};
    } else {
      all[kAuxiliary.size() + i] = {kNames[i], calls[i], "sm90::FinishKeysParams", 4};
    }
  }
  return all;
}
/// Those of both types.
struct FinishKernels {
  FinishKernel bf16, f16;
};
inline constexpr FinishKernels kFinishRows = {FinishKernel::bf16, FinishKernel::f16};
inline constexpr FinishKernels kFinishMmaRows = {FinishKernel::mma_bf16, FinishKernel::mma_f16};
inline constexpr FinishKernels kFinishKeys = {FinishKernel::keys_bf16, FinishKernel::keys_f16};
/// @}

/// CUDA C++ of all these kernels, of which the first are kAuxiliary. includes: of the others.
std::string auxiliary_program(std::span<const Auxiliary> kernels, const std::string& includes);

}  // namespace tessera::cuda
