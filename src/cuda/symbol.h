// Names in the table of cubins; a row's is its kernel function's, too.
#pragma once

#include <algorithm>
#include <string>

#include "plan/names.h"

namespace tessera::cuda {

/// Of the yardstick's kernels: multiply_peak and read_peak.
inline constexpr const char* kPeakSymbol = "tessera_sm90_peak";

/// What the backward pass does before and after its main kernel: prepare_rows_bf16, finish_rows_f16
/// and so on, sum_sinks.
inline constexpr const char* kBackwardRowsSymbol = "tessera_sm90_backward_rows";

/// name_of(), as an identifier.
inline std::string symbol_of(const core::Kernel& kernel) {
  std::string symbol = "tessera_" + name_of(kernel);
  std::replace(symbol.begin(), symbol.end(), '.', '_');
  return symbol;
}

}  // namespace tessera::cuda
