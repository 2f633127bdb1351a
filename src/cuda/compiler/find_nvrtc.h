// Which libnvrtc of this machine compiles for an architecture, and why others do not. Called by
// at_need.cpp.
#pragma once

#include <string>

#include "cuda/compiler/nvrtc.h"

namespace tessera::cuda {

/// What a libnvrtc must be able to do.
struct NvrtcNeed {
  std::string target;  ///< "sm_90a"
  int driver = 0;      ///< CUDA version of the driver that loads the code, 12020 for 12.2; 0: any
};

struct FoundNvrtc {
  const Nvrtc* nvrtc = nullptr;  ///< for as long as the process lives; null: none
  std::string why;               ///< there is none: what was found, and what to do
};

/// In this order: $TESSERA_NVRTC and nothing else, if it is set; what this process has open
/// already; folders that were added; those of Conda and of the toolkit; what the system knows.
/// Thread-safe.
FoundNvrtc find_nvrtc(const NvrtcNeed& need);

/// As tessera::add_nvrtc_folder.
void add_nvrtc_folder(const std::string& folder);

}  // namespace tessera::cuda
