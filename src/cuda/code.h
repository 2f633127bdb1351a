// Machine code on its way to the device: of a build, or compiled when it is needed; loaded by its
// first use.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/compiler/compiler.h"
#include "cuda/driver.h"

namespace tessera::cuda {

/// A program's code, loaded into a library of the driver's, for the current context's device of
/// that compute capability. In this order: machine code of the build, what the folder of compiled
/// code has, what NVRTC makes for this very device, the build's PTX; what the driver does not take
/// counts as not there. stream: that the first launch is for, as nothing may be compiled while it
/// is captured. Errors: device (no code and no way to make it, a stream that is captured, the
/// driver's own).
Status load_library(CuLibrary& library, const Program& program, int capability, CuStream stream);

/// Finds the function `name` in it, for the current context, and allows it shared_bytes of shared
/// memory. Errors: device.
Status load_function(CuFunction& function, CuLibrary library, const char* name, int shared_bytes);

/// Has an architecture code for such a device, of this build, kept or to be made here?
bool has_code(const Architecture& architecture, int capability);

/// Has this build machine code of the program for such a device?
bool has_code(const Program& program, int capability);

/// As tessera::compile_ahead, of one program: what was compiled is counted in `compiled`.
Status compile_ahead(const Program& program, int capability, std::size_t& compiled);

}  // namespace tessera::cuda
