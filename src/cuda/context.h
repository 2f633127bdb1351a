// The primary context of a device, the one that CUDA's runtime and the frameworks on it use.
#pragma once

#include "cuda/driver.h"

namespace tessera::cuda {

inline constexpr std::size_t kMostDevices = 64;  ///< of one process

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
  CuDevice device() const { return device_; }

 private:
  Status status_;
  CuDevice device_ = 0;
  bool pushed_ = false;
};

}  // namespace tessera::cuda
