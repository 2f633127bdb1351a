// The device code inside the library. cubins.cpp is made at build time by cuda/compiler/.
#pragma once

#include <span>

namespace tessera::cuda {

/// A program's machine code, or PTX that the driver makes some of.
struct Cubin {
  const char* symbol;  ///< Program::symbol
  const char* target;  ///< Image::target
  const unsigned char* begin;
  const unsigned char* end;
};

/// PTX ends with a 0, behind `end`.
std::span<const Cubin> cubins();

}  // namespace tessera::cuda
