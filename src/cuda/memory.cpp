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

}  // namespace tessera::cuda
