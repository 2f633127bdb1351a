#include "tessera/buffer.hpp"

#include <cstring>
#include <new>
#include <string>

#include "cuda/memory.h"

namespace tessera {
namespace {

constexpr auto kAlignment = std::align_val_t{64};

}  // namespace

Result<Buffer> Buffer::allocate(const Device& device, std::size_t bytes) {
  Buffer buffer;
  buffer.bytes_ = bytes;
  buffer.on_gpu_ = is_gpu(device.arch);
  buffer.ordinal_ = device.ordinal;
  if (bytes == 0) return buffer;
  if (buffer.on_gpu_) {
    const Result<void*> memory = cuda::allocate(device.ordinal, bytes);
    if (!memory) return memory.status();
    buffer.data_ = *memory;
  } else {
    buffer.data_ = ::operator new(bytes, kAlignment, std::nothrow);
    if (buffer.data_ == nullptr) {
      return Status::workspace("bytes = " + std::to_string(bytes) + ": could not be allocated");
    }
  }
  return buffer;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (on_gpu_) {
    cuda::deallocate(ordinal_, data_);
  } else {
    ::operator delete(data_, kAlignment);
  }
}

Status Buffer::check_range(std::size_t bytes, std::size_t offset) const {
  if (offset <= bytes_ && bytes <= bytes_ - offset) return {};
  return Status::invalid("bytes = " + std::to_string(bytes) + ", offset = " +
                         std::to_string(offset) + ": the buffer has " + std::to_string(bytes_));
}

Status Buffer::write(const void* from, std::size_t bytes, std::size_t offset) {
  if (Status s = check_range(bytes, offset); !s || bytes == 0) return s;
  if (from == nullptr) return Status::invalid("from = null: must point to the bytes");
  std::byte* const to = static_cast<std::byte*>(data_) + offset;
  if (on_gpu_) return cuda::copy_to_device(ordinal_, to, from, bytes);
  std::memcpy(to, from, bytes);
  return {};
}

Status Buffer::read(void* to, std::size_t bytes, std::size_t offset) const {
  if (Status s = check_range(bytes, offset); !s || bytes == 0) return s;
  if (to == nullptr) return Status::invalid("to = null: must point to the bytes");
  const std::byte* const from = static_cast<const std::byte*>(data_) + offset;
  if (on_gpu_) return cuda::copy_to_host(ordinal_, to, from, bytes);
  std::memcpy(to, from, bytes);
  return {};
}

Status synchronize(const Device& device, void* stream) {
  return is_gpu(device.arch) ? cuda::synchronize(device.ordinal, stream) : Status{};
}

}  // namespace tessera
