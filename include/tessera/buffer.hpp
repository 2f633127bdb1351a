// Memory of a device, for programs that have none of a framework's: tests, tools, plain C++.
#pragma once

#include <cstddef>
#include <utility>

#include "tessera/device.hpp"

namespace tessera {

/// Bytes on a GPU, or on the host if the device is a CPU; aligned to 64 at least, not initialised,
/// freed with the object. Copies wait until they are done.
class TESSERA_API Buffer {
 public:
  /// No memory.
  Buffer() = default;
  /// Errors: workspace (not enough host memory), device (the driver's own, out of memory included).
  static Result<Buffer> allocate(const Device& device, std::size_t bytes);
  /// Takes the other's memory.
  /// @{
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  /// @}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  /// An address of the device.
  void* data() const { return data_; }
  /// As allocated.
  std::size_t bytes() const { return bytes_; }

  /// Copies host memory to [offset, offset + bytes). Errors: invalid (beyond the end), device.
  Status write(const void* from, std::size_t bytes, std::size_t offset = 0);
  /// Copies [offset, offset + bytes) to host memory. Errors: as write().
  Status read(void* to, std::size_t bytes, std::size_t offset = 0) const;

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(on_gpu_, other.on_gpu_);
    std::swap(ordinal_, other.ordinal_);
  }
  Status check_range(std::size_t bytes, std::size_t offset) const;

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool on_gpu_ = false;
  int ordinal_ = 0;
};

/// Waits until everything enqueued on the stream (null: the default one) is done. A CPU's runs are
/// done when they return. Errors: device (also those of the kernels waited for).
TESSERA_API Status synchronize(const Device& device, void* stream = nullptr);

}  // namespace tessera
