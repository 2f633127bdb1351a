// The memory of a run on a GPU: every block of a RunMemory with its guard zones.
#pragma once

#include <vector>

#include "check/inputs.h"
#include "tessera/buffer.hpp"

namespace tessera::tools {

class DeviceCopy {
 public:
  /// Errors: device.
  static Result<DeviceCopy> of(const RunMemory& memory, const Device& device);

  /// Those of the RunMemory, pointing to the device; addresses are as little aligned as there.
  const Tensors& tensors() const { return tensors_; }

  /// Copies everything back, what should not have changed too. Errors: device.
  Status bring_back(const RunMemory& memory) const;

 private:
  /// Of a block: where it lies on the host, and where on the device.
  struct Place {
    std::byte* start = nullptr;  ///< guard zones included
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
