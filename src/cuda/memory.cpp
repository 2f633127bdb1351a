#include "cuda/memory.h"

#include "cuda/context.h"

namespace tessera::cuda {

Result<void*> allocate(int ordinal, std::size_t bytes) {
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  std::uint64_t address = 0;
  const Status status = driver().check(driver().memory_allocate(&address, bytes), "cuMemAlloc");
  if (!status) return status;
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

void deallocate(int ordinal, void* memory) {
  const CurrentContext context(ordinal);
  if (context.status()) driver().memory_free(reinterpret_cast<std::uintptr_t>(memory));
}

Result<void*> allocate_async(int ordinal, std::size_t bytes, void* stream) {
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  std::uint64_t address = 0;
  const Status status =
      driver().check(driver().memory_allocate_async(&address, bytes, static_cast<CuStream>(stream)),
                     "cuMemAllocAsync");
  if (!status) return status;
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

Status deallocate_async(int ordinal, void* memory, void* stream) {
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  return driver().check(driver().memory_free_async(reinterpret_cast<std::uintptr_t>(memory),
                                                   static_cast<CuStream>(stream)),
                        "cuMemFreeAsync");
}

Status copy_to_device(int ordinal, void* to, const void* from, std::size_t bytes) {
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  return driver().check(driver().copy_to_device(reinterpret_cast<std::uintptr_t>(to), from, bytes),
                        "cuMemcpyHtoD");
}

Status copy_to_host(int ordinal, void* to, const void* from, std::size_t bytes) {
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  return driver().check(driver().copy_to_host(to, reinterpret_cast<std::uintptr_t>(from), bytes),
                        "cuMemcpyDtoH");
}

Status synchronize(int ordinal, void* stream) {
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  return driver().check(driver().stream_synchronize(static_cast<CuStream>(stream)),
                        "cuStreamSynchronize");
}

Result<Place> place_of(const void* address) {
  if (!driver_is_open() || !driver().available()) return Place{};
  unsigned type = 0, managed = 0;
  int ordinal = 0;
  const int attributes[] = {kPointerMemoryType, kPointerIsManaged, kPointerOrdinal};
  void* values[] = {&type, &managed, &ordinal};
  // Of an address that it does not know the driver says nothing, and succeeds.
  const Status status = driver().check(
      driver().pointer_attributes(3, attributes, values, reinterpret_cast<std::uintptr_t>(address)),
      "cuPointerGetAttributes");
  if (!status) return status;
  if (managed != 0) return Place{Place::Kind::managed, ordinal};
  if (type == kMemoryDevice) return Place{Place::Kind::device, ordinal};
  return Place{type == kMemoryHost ? Place::Kind::pinned : Place::Kind::host, 0};
}

}  // namespace tessera::cuda
