// The CPU kernels of one instruction set: compiled once per set, with TESSERA_ISA naming it. Every
// catalog row of this set becomes a function; the row itself is the template argument.
#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <array>
#include <cstddef>
#include <utility>

#include "cpu/append.h"
#include "cpu/backward.h"
#include "cpu/combine.h"
#include "cpu/decode.h"
#include "cpu/forward.h"
#include "cpu/isa.h"
#include "cpu/peak.h"
#include "cpu/quantize.h"
#include "plan/catalog.h"

namespace tessera::cpu::TESSERA_ISA {
namespace {

/// Only for rows of this set.
template <core::Kernel K>
constexpr KernelFunction kernel_of() {
  if constexpr (K.pass == Pass::forward && K.form == core::Form::tile) {
    return &forward<K>;
  } else if constexpr (K.pass == Pass::forward) {
    return &decode<K>;
  } else {
    return &backward<K>;
  }
}

/// Other sets' rows, GPUs' above all, leave no code here.
template <std::size_t kRow>
TESSERA_INLINE void find_at(const core::Kernel& row, KernelFunction& found) {
  if constexpr (kCatalog[kRow].arch == Arch::TESSERA_ISA) {
    if (row == kCatalog[kRow]) found = kernel_of<kCatalog[kRow]>();
  }
}

template <std::size_t... kRow>
KernelFunction find(const core::Kernel& row, std::index_sequence<kRow...>) {
  KernelFunction found = nullptr;
  (find_at<kRow>(row, found), ...);
  return found;
}

KernelFunction find_kernel(const core::Kernel& row) {
  return find(row, std::make_index_sequence<std::size(kCatalog)>{});
}

}  // namespace

extern const Isa kIsa = {find_kernel, combine_partial, append_rows, quantize_rows,
                         f32_burst,   bf16_burst,      read_sweep};

}  // namespace tessera::cpu::TESSERA_ISA
