// A row's name in the table of cubins, which is its kernel function's, too.
#pragma once

#include <algorithm>
#include <string>

#include "plan/names.h"

namespace tessera::cuda {

/// name_of(), as an identifier.
inline std::string symbol_of(const core::Kernel& kernel) {
  std::string symbol = "tessera_" + name_of(kernel);
  std::replace(symbol.begin(), symbol.end(), '.', '_');
  return symbol;
}

}  // namespace tessera::cuda
