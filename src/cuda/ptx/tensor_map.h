// A CUtensorMap: made by the driver on the host, read by the copy engine.
#pragma once

#include <cstdint>

namespace tessera::cuda::ptx {

struct alignas(64) TensorMap {
  std::uint64_t words[16];
};

}  // namespace tessera::cuda::ptx
