// How the launches of a pass reach the driver: kernels of the catalog's rows and what an
// architecture has beside them, loaded by their first use.
#pragma once

#include <cstdint>

#include "core/kernel.h"
#include "cuda/architecture.h"
#include "cuda/context.h"
#include "cuda/driver.h"
#include "plan/plan.h"

namespace tessera::cuda {

/// A device of which the context is current, a stream of it, and whose kernels run there.
struct Queue {
  const Architecture* architecture = nullptr;
  GpuDevice device;
  CuStream stream = nullptr;

  /// A row's kernel, or the architecture's auxiliary kernel with that number, on the device: loaded
  /// by whoever asks first. What could not be loaded is tried again by the next. Errors: device.
  /// @{
  Result<CuFunction> load(const core::Kernel& row) const;
  Result<CuFunction> load_auxiliary(std::size_t number) const;
  /// @}

  /// Enqueues a row's kernel, or the architecture's auxiliary kernel with that number; params: the
  /// kernel's only parameter, copied. Errors: device.
  Status launch(const core::Kernel& row, std::int64_t blocks, const void* params) const;
  Status launch_auxiliary(std::size_t number, std::int64_t blocks, const void* params) const;

  /// Enqueues that a counter in the device's memory becomes 0. Errors: device.
  Status clear(std::int32_t* counter) const;
};

}  // namespace tessera::cuda
