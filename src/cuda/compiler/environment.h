// A variable of the process's environment.
#pragma once

#include <cstdlib>
#include <string>

namespace tessera::cuda {

/// Empty: not set, or set to nothing.
inline std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace tessera::cuda
