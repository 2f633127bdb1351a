// Code for tests on the fake driver, whatever GPUs the build has kernels for.
#pragma once

#include "cuda/compiler/device_headers.h"
#include "cuda/environment.h"

namespace tessera::cuda {

/// As long as it lives, fake_nvrtc.cpp compiles what the build has no code of, and nothing is kept.
class FakeCode {
 public:
  /// False: a build without CUDA, which compiles nothing. Else every row has code.
  static bool is_possible() { return !device_headers().empty(); }

  FakeCode() {
    environment_.set("TESSERA_NVRTC", TESSERA_FAKE_NVRTC);
    environment_.set("TESSERA_CACHE_DIR", "/proc/no/such/folder");
  }

 private:
  Environment environment_;
};

}  // namespace tessera::cuda
