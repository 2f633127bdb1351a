// Memory of a GPU and waiting for it. Called by buffer.cpp, attend.cpp and peaks.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/status.hpp"

namespace tessera::cuda {

/// Errors of all: device (the driver's own).
Result<void*> allocate(int ordinal, std::size_t bytes);
void deallocate(int ordinal, void* memory);
Status copy_to_device(int ordinal, void* to, const void* from, std::size_t bytes);
Status copy_to_host(int ordinal, void* to, const void* from, std::size_t bytes);
/// The same in the order of a stream: usable by what is enqueued between the two. Neither waits.
Result<void*> allocate_async(int ordinal, std::size_t bytes, void* stream);
Status deallocate_async(int ordinal, void* memory, void* stream);
/// Waits until what was enqueued on the stream is done.
Status synchronize(int ordinal, void* stream);

/// Where an address lies.
struct Place {
  enum class Kind : std::uint8_t {
    host,     ///< plain memory of the host
    pinned,   ///< the host's, and known to the driver
    managed,  ///< moved by the driver between host and GPUs
    device,   ///< a GPU's
  };
  Kind kind = Kind::host;
  int ordinal = 0;  ///< managed, device: of which GPU
};

/// Host in a process that has no driver open. Errors: device (the driver's own).
Result<Place> place_of(const void* address);

}  // namespace tessera::cuda
