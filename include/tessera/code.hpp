// Machine code of GPU kernels that this build does not bring: compiled when it is needed, by NVRTC
// if this machine has it, and kept in a folder of the user's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/status.hpp"

namespace tessera {

class Plan;

/// Loads all code that runs of this plan need on its device, and compiles what the build does not
/// have. Without it the first run does so. Nothing of that may happen while a stream is captured:
/// call this before. Takes seconds at most for each kernel that has to be compiled. A CPU's plan
/// has nothing to load. Errors: device (no driver, no code for a kernel and no NVRTC, the driver's
/// own).
TESSERA_API Status prepare(const Plan& plan);

/// The same without a GPU, for a device of any name: code that the build does not have is compiled
/// and kept, so that a machine like this one finds it. Returns how many kernels were compiled.
/// Errors: device (no NVRTC, no folder to keep code in).
TESSERA_API Result<std::size_t> compile_ahead(const Plan& plan);

/// Where compiled code is kept: $TESSERA_CACHE_DIR, $XDG_CACHE_HOME/tessera or ~/.cache/tessera. It
/// is the user's own, and nobody else may write there: code from it is run. Errors: device (none of
/// these is set, or it belongs to others).
TESSERA_API Result<std::string> code_cache_folder();

/// A kernel in that folder.
struct CachedKernel {
  std::string name;           ///< e.g. "tessera_sm90_forward_bf16_d128_128x128"
  std::uint64_t bytes = 0;    ///< of its file
  std::int64_t last_use = 0;  ///< seconds since 1970
};

/// All of them, by name. A folder that is not there is empty. Errors: as code_cache_folder().
TESSERA_API Result<std::vector<CachedKernel>> cached_kernels();

/// Removes them, and returns how many there were. Errors: as code_cache_folder().
TESSERA_API Result<std::size_t> clear_code_cache();

/// One more folder to look for libnvrtc in: one that has packages of Python, or the library itself.
/// Before all: the file that $TESSERA_NVRTC names. Thread-safe.
TESSERA_API void add_nvrtc_folder(const std::string& folder);

}  // namespace tessera
