// The name of a row's kernel function, in its cubin and in the table of cubins.
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
