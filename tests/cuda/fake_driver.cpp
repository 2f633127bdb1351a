// A libcuda.so.1 without a GPU: two devices that look like an H200, memory that is the host's,
// launches that are only counted. It shows what the library asks of the driver, and in which order.
#include "cuda/fake_driver.h"

#include <cstdlib>
#include <cstring>

#include "cuda/driver.h"

namespace tessera::fake {
namespace {

std::vector<void*>& stack() {
  static std::vector<void*> contexts;
  return contexts;
}

char contexts[2];

/// Counts a call; what it shall return.
int called(const char* name) {
  ++state().calls[name];
  const auto failure = state().failures.find(name);
  return failure == state().failures.end() ? 0 : failure->second;
}

}  // namespace

State& state() {
  static State all;
  return all;
}

void* context_of(int ordinal) { return &contexts[ordinal]; }

}  // namespace tessera::fake

using tessera::cuda::CuLaunchConfig;
using tessera::fake::called;
using tessera::fake::state;

// NOLINTBEGIN(readability-identifier-naming): the driver's names
extern "C" {

int cuInit(unsigned /*flags*/) { return called("cuInit"); }

/// NVRTC's: it looks for the driver by itself, and takes an error for an answer but not that there
/// is no such function.
int cuGetExportTable(const void** table, const void* /*id*/) {
  *table = nullptr;
  return 500;  // CUDA_ERROR_NOT_FOUND
}

int cuGetErrorName(int result, const char** name) {
  *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int /*result*/, const char** text) {
  *text = "a fake of what went wrong";
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = state().driver_version;
  return called("cuDriverGetVersion");
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return called("cuDeviceGetCount");
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return called("cuDeviceGet");
}
int cuDeviceGetName(char* name, int size, int /*device*/) {
  std::strncpy(name, "Fake H200", static_cast<std::size_t>(size));
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  const std::map<int, int> h200 = {{tessera::cuda::kMultiprocessorCount, 132},
                                   {tessera::cuda::kL2Bytes, 60 << 20},
                                   {tessera::cuda::kComputeMajor, 9},
                                   {tessera::cuda::kComputeMinor, 0},
                                   {tessera::cuda::kSharedBytesOptin, 232448}};
  const auto other = state().attributes.find(attribute);
  *value = other != state().attributes.end() ? other->second : h200.at(attribute);
  return called("cuDeviceGetAttribute");
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = tessera::fake::context_of(device);
  return called("cuDevicePrimaryCtxRetain");
}
int cuCtxGetCurrent(void** context) {
  *context = state().current;
  return called("cuCtxGetCurrent");
}
int cuCtxPushCurrent_v2(void* context) {
  tessera::fake::stack().push_back(state().current);
  state().current = context;
  return called("cuCtxPushCurrent");
}
int cuCtxPopCurrent_v2(void** context) {
  *context = state().current;
  state().current = tessera::fake::stack().back();
  tessera::fake::stack().pop_back();
  return called("cuCtxPopCurrent");
}
int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
  const int result = called("cuMemAlloc");
  if (result == 0) {
    *address = reinterpret_cast<std::uintptr_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  }
  return result;
}
int cuMemFree_v2(std::uint64_t address) {
  std::free(reinterpret_cast<void*>(address));  // NOLINT(performance-no-int-to-ptr)
  return called("cuMemFree");
}
int cuMemAllocAsync(std::uint64_t* address, std::size_t bytes, void* stream) {
  state().enqueued.emplace_back("cuMemAllocAsync", stream);
  const int result = called("cuMemAllocAsync");
  if (result == 0) {
    *address = reinterpret_cast<std::uintptr_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  }
  return result;
}
int cuMemFreeAsync(std::uint64_t address, void* stream) {
  state().enqueued.emplace_back("cuMemFreeAsync", stream);
  std::free(reinterpret_cast<void*>(address));  // NOLINT(performance-no-int-to-ptr)
  return called("cuMemFreeAsync");
}
int cuMemsetD32Async(std::uint64_t address, unsigned value, std::size_t count, void* stream) {
  auto* const words = reinterpret_cast<unsigned*>(address);  // NOLINT(performance-no-int-to-ptr)
  std::fill_n(words, count, value);
  state().enqueued.emplace_back("cuMemsetD32Async", stream);
  return called("cuMemsetD32Async");
}
int cuPointerGetAttributes(unsigned number, const int* attributes, void** values,
                           std::uint64_t address) {
  tessera::fake::Range found;
  for (const tessera::fake::Range& range : state().ranges) {
    const auto start = reinterpret_cast<std::uintptr_t>(range.start);
    if (address >= start && address < start + range.bytes) found = range;
  }
  for (unsigned i = 0; i < number; ++i) {
    if (attributes[i] == tessera::cuda::kPointerMemoryType) {
      *static_cast<unsigned*>(values[i]) = found.type;
    } else if (attributes[i] == tessera::cuda::kPointerIsManaged) {
      *static_cast<unsigned*>(values[i]) = found.managed ? 1 : 0;
    } else if (attributes[i] == tessera::cuda::kPointerOrdinal) {
      *static_cast<int*>(values[i]) = found.ordinal;
    }
  }
  return called("cuPointerGetAttributes");
}
int cuMemcpyHtoD_v2(std::uint64_t to, const void* from, std::size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);  // NOLINT(performance-no-int-to-ptr)
  return called("cuMemcpyHtoD");
}
int cuMemcpyDtoH_v2(void* to, std::uint64_t from, std::size_t bytes) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);  // NOLINT(performance-no-int-to-ptr)
  return called("cuMemcpyDtoH");
}
int cuStreamSynchronize(void* /*stream*/) { return called("cuStreamSynchronize"); }

int cuStreamIsCapturing(void* stream, int* status) {
  *status = stream != nullptr && stream == state().captured ? 1 : 0;
  return called("cuStreamIsCapturing");
}

int cuLibraryLoadData(void** library, const void* image, int* /*jit_options*/, void** /*values*/,
                      unsigned /*num_jit*/, int* /*options*/, void** /*option_values*/,
                      unsigned /*num*/) {
  *library = const_cast<void*>(image);
  constexpr std::size_t kBeginning = 64;  // all are longer
  state().images.emplace_back(static_cast<const char*>(image), kBeginning);
  const int result = called("cuLibraryLoadData");
  // As a driver that does not know the build's code: any other is good.
  if (result != 0 && state().refuses_first_image_only) state().failures.erase("cuLibraryLoadData");
  return result;
}
int cuLibraryGetKernel(void** kernel, void* /*library*/, const char* name) {
  *kernel = strdup(name);  // lives as long as the kernel: for ever
  return called("cuLibraryGetKernel");
}
int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return called("cuKernelGetFunction");
}
int cuFuncSetAttribute(void* /*function*/, int /*attribute*/, int /*value*/) {
  return called("cuFuncSetAttribute");
}
int cuLaunchKernelEx(const CuLaunchConfig* config, void* function, void** parameters,
                     void** /*extra*/) {
  state().last = {config->grid_x,
                  config->block_x,
                  config->shared_bytes,
                  reinterpret_cast<void*>(config->stream),
                  static_cast<const char*>(function),
                  state().current,
                  false};
  const auto* attribute = static_cast<const tessera::cuda::CuLaunchAttribute*>(config->attributes);
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    state().last.begins_early |=
        attribute[i].id == tessera::cuda::kProgrammaticSerialization && attribute[i].value != 0;
  }
  state().launches.push_back(state().last);
  state().enqueued.emplace_back("cuLaunchKernelEx", state().last.stream);
  if (state().on_launch) state().on_launch(state().last, parameters[0]);
  return called("cuLaunchKernelEx");
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned /*rank*/, void* address,
                           const std::uint64_t* sizes, const std::uint64_t* strides,
                           const unsigned* box, const unsigned* /*element_strides*/,
                           int /*interleave*/, int /*swizzle*/, int promotion, int /*fill*/) {
  const bool bytes = type == tessera::cuda::kMapUint8;
  const tessera::fake::EncodedMap encoded = {static_cast<const char*>(address),
                                             {sizes[0], sizes[1], sizes[2], sizes[3]},
                                             {strides[0], strides[1], strides[2]},
                                             {box[0], box[1], box[2], box[3]},
                                             bytes ? 1U : 2U};
  static_assert(sizeof encoded <= 128);
  std::memcpy(map, &encoded, sizeof encoded);
  state().boxes.push_back({box[0], box[1], box[2], box[3]});
  state().promotions.push_back(promotion);
  return called("cuTensorMapEncodeTiled");
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
