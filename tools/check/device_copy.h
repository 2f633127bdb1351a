// The memory of a run on a GPU: every block of a RunMemory with its guard zones, or the tensors of
// a run as they are.
#pragma once

#include <span>
#include <vector>

#include "check/inputs.h"
#include "tessera/buffer.hpp"

namespace tessera::tools {

/// Host memory of a tensor, whole.
struct HostRange {
  const void* start = nullptr;
  std::size_t bytes = 0;
  void* result = nullptr;  ///< start, if a run writes it and reads nothing there
};

class DeviceCopy {
 public:
  /// Errors: device.
  static Result<DeviceCopy> of(const RunMemory& memory, const Device& device);
  /// Of tensors that point into the ranges; on the device each begins aligned. Errors: device.
  static Result<DeviceCopy> of(const Tensors& tensors, std::span<const HostRange> ranges,
                               const Device& device);

  /// Those of the host, pointing to the device; a RunMemory's are as little aligned as there.
  const Tensors& tensors() const { return tensors_; }

  /// Copies everything back, what should not have changed too. Errors: device.
  Status bring_back(const RunMemory& memory) const;
  /// Copies results back. Errors: device.
  Status bring_back(std::span<const HostRange> ranges) const;

 private:
  /// Of a block: where it lies on the host, and where on the device.
  struct Place {
    const std::byte* start = nullptr;  ///< guard zones included
    std::size_t bytes = 0;
    std::size_t phase = 0;  ///< bytes from the start of the buffer
    Buffer buffer;
  };

  template <class T>
  void move(T*& pointer) const;
  void move_all();

  std::vector<Place> places_;
  Tensors tensors_;
};

}  // namespace tessera::tools
