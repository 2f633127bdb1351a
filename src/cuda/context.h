// The primary context of a device, the one that CUDA's runtime and the frameworks on it use.
#pragma once

#include "cuda/driver.h"

namespace tessera::cuda {

inline constexpr std::size_t kMostDevices = 64;  ///< of one process

/// A device of the driver's, and its compute capability: 90 for 9.0.
struct GpuDevice {
  CuDevice handle = 0;
  int capability = 0;
};

/// Makes a device's primary context the calling thread's for a while. It is retained by the first
/// use and kept for the life of the process.
class CurrentContext {
 public:
  explicit CurrentContext(int ordinal);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  /// Device: no driver, no such GPU, or the driver's own error.
  const Status& status() const { return status_; }
  const GpuDevice& device() const { return device_; }

 private:
  Status status_;
  GpuDevice device_;
  bool pushed_ = false;
};

}  // namespace tessera::cuda
