// Memory of a GPU and waiting for it. Called by buffer.cpp and peaks.cpp.
#pragma once

#include <cstddef>

#include "tessera/status.hpp"

namespace tessera::cuda {

/// Errors of all: device (the driver's own).
Result<void*> allocate(int ordinal, std::size_t bytes);
void deallocate(int ordinal, void* memory);
Status copy_to_device(int ordinal, void* to, const void* from, std::size_t bytes);
Status copy_to_host(int ordinal, void* to, const void* from, std::size_t bytes);
/// Waits until what was enqueued on the stream is done.
Status synchronize(int ordinal, void* stream);

}  // namespace tessera::cuda
