// The CPU kernels of one instruction set: compiled once per set, with TESSERA_ISA naming it. Every
// catalog row of this set becomes a function; the row itself is the template argument.
#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 warns about the deliberately undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <algorithm>
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

constexpr bool is_of_this_set(const core::Kernel& row) { return row.arch == Arch::TESSERA_ISA; }

/// This set's rows alone: other sets' rows, GPUs' above all, leave no code here.
constexpr auto rows_of_this_set() {
  std::array<core::Kernel, std::ranges::count_if(kCatalog, is_of_this_set)> rows = {};
  std::ranges::copy_if(kCatalog, rows.begin(), is_of_this_set);
  return rows;
}

constexpr auto kRows = rows_of_this_set();

template <std::size_t... kRow>
KernelFunction find(const core::Kernel& row, std::index_sequence<kRow...> /*rows*/) {
  KernelFunction found = nullptr;
  ((row == kRows[kRow] ? void(found = kernel_of<kRows[kRow]>()) : void()), ...);
  return found;
}

KernelFunction find_kernel(const core::Kernel& row) {
  return find(row, std::make_index_sequence<kRows.size()>{});
}

template <Arch kSet>
constexpr Isa make_isa() {
  Isa isa = {find_kernel, f32_burst, bf16_burst, read_sweep};
  if constexpr (row_set_of(kSet) == kSet) {
    isa.combine = combine_partial;
    isa.append = append_rows;
    isa.quantize = quantize_rows;
  }
  return isa;
}

}  // namespace

extern constexpr Isa kIsa = make_isa<Arch::TESSERA_ISA>();

}  // namespace tessera::cpu::TESSERA_ISA
