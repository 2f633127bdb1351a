// What device code includes, as texts inside the library: the build writes the table
// (cmake/cuda.cmake). Empty in a build without CUDA.
#pragma once

#include <span>

namespace tessera::cuda {

struct DeviceHeader {
  const char* name;  ///< as #include names it
  const char* begin;
  const char* end;
};

std::span<const DeviceHeader> device_headers();

}  // namespace tessera::cuda
