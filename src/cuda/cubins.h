// The device code inside the library. cubins.cpp is made at build time by cuda/compiler/.
#pragma once

#include <span>

namespace tessera::cuda {

/// One catalog row's machine code.
struct Cubin {
  const char* symbol;  ///< symbol_of(row)
  const unsigned char* begin;
  const unsigned char* end;
};

std::span<const Cubin> cubins();

}  // namespace tessera::cuda
