// Where tensors lie: which device serves them, and whether it can reach them all. For the doors
// that take a device from their tensors.
#pragma once

#include <span>

#include "tessera/tessera.hpp"

namespace tessera {

/// A tensor of a call; null: not given, or without elements. Memory of no bytes may be anywhere.
struct Given {
  const char* name;
  const void* data;
};

/// The GPU on which the first tensor lies, or this CPU. Errors: device.
Result<Device> device_of(std::span<const Given> tensors);

/// Every tensor must lie where the device may read and write it, unless the caller knows that they
/// do. `what` wants it: "attention". Errors: invalid, device.
Status check_places(const Execution& execution, std::span<const Given> tensors,
                    const Device& device, const char* what);

}  // namespace tessera
