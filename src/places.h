// Where tensors lie: which device serves them, and whether it can reach them all. For the doors
// that take a device from their tensors.
#pragma once

#include <span>

#include "tessera/device.hpp"
#include "tessera/status.hpp"

namespace tessera {

/// A tensor of a call; null: not given, or without elements. Memory of no bytes may be anywhere.
struct Given {
  const char* name;
  const void* data;
};

/// The GPU on which the first tensor lies, or this CPU. Errors: device.
Result<Device> device_of(std::span<const Given> tensors);

/// Every tensor must lie where the device may read and write it. `what` wants it: "attention".
/// Errors: invalid, device.
Status check_places(std::span<const Given> tensors, const Device& device, const char* what);

}  // namespace tessera
