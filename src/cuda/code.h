// Machine code on its way to the device: a kernel by its symbol, loaded by its first use.
#pragma once

#include <string>

#include "cuda/driver.h"

namespace tessera::cuda {

/// Loads the cubin of this name into the current context and finds the function `name` in it;
/// allows it shared_bytes of shared memory. Errors: device (not part of this build, or the driver's
/// own).
Status load_function(CuFunction& function, const std::string& cubin, const char* name,
                     int shared_bytes);

}  // namespace tessera::cuda
