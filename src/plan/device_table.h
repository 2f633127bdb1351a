// The table of named processors behind named_device().
#pragma once

#include <vector>

#include "tessera/device.hpp"

namespace tessera {

const std::vector<Device>& device_table();

}  // namespace tessera
