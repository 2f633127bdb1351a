// Code for tests on the fake driver, whatever GPUs the build has kernels for.
#pragma once

#include "cuda/environment.h"

namespace tessera::cuda {

/// As long as it lives, fake_nvrtc.cpp compiles what the build has no code of, and nothing is kept.
/// A build without CUDA compiles nothing.
class FakeCode {
 public:
  FakeCode() {
    environment_.set("TESSERA_NVRTC", TESSERA_FAKE_NVRTC);
    environment_.set("TESSERA_CACHE_DIR", "/proc/no/such/folder");
  }

 private:
  Environment environment_;
};

}  // namespace tessera::cuda
