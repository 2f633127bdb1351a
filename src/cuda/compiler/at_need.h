// Machine code of a program that the build does not bring: from the folder of compiled code, or
// made by NVRTC and left there. Called by cuda/code.cpp.
#pragma once

#include <string>

#include "cuda/compiler/compiler.h"
#include "tessera/status.hpp"

namespace tessera::cuda {

/// Could machine_code() make an architecture's programs for devices of that compute capability, or
/// has it made those that are not rows?
bool can_make(const Architecture& architecture, int capability, int driver);

/// A cubin for devices of that compute capability. What this process has made it remembers. driver:
/// CUDA version of the driver that loads it, 12020 for 12.2; 0: any. compiled: counts what NVRTC
/// was asked for, if not null. Compiling takes seconds: one at a time, and a line on stderr where
/// it takes more than one. Thread-safe. Errors: device (no NVRTC that can, what it says of the
/// program).
Result<std::string> machine_code(const Program& program, int capability, int driver,
                                 std::size_t* compiled = nullptr);

}  // namespace tessera::cuda
