// Opening libcuda and finding its entry points.
#include "cuda/driver.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>

namespace tessera::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

Driver open_driver() {
  Driver d{};
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    d.missing = "no NVIDIA driver: libcuda.so.1 cannot be opened";
    return d;
  }
  const auto find = [&](auto& function, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr && d.missing.empty()) {
      d.missing =
          std::string("the NVIDIA driver has no ") + name + "; it must be of CUDA 12.0 or later";
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find(d.init, "cuInit");
  find(d.get_error_name, "cuGetErrorName");
  find(d.get_error_string, "cuGetErrorString");
  find(d.driver_version, "cuDriverGetVersion");
  find(d.device_count, "cuDeviceGetCount");
  find(d.device_get, "cuDeviceGet");
  find(d.device_name, "cuDeviceGetName");
  find(d.device_attribute, "cuDeviceGetAttribute");
  find(d.primary_context_retain, "cuDevicePrimaryCtxRetain");
  find(d.context_current, "cuCtxGetCurrent");
  find(d.context_push, "cuCtxPushCurrent_v2");
  find(d.context_pop, "cuCtxPopCurrent_v2");
  find(d.memory_allocate, "cuMemAlloc_v2");
  find(d.memory_free, "cuMemFree_v2");
  find(d.memory_allocate_async, "cuMemAllocAsync");
  find(d.memory_free_async, "cuMemFreeAsync");
  find(d.set_memory_async, "cuMemsetD32Async");
  find(d.pointer_attributes, "cuPointerGetAttributes");
  find(d.copy_to_device, "cuMemcpyHtoD_v2");
  find(d.copy_to_host, "cuMemcpyDtoH_v2");
  find(d.stream_synchronize, "cuStreamSynchronize");
  find(d.stream_is_capturing, "cuStreamIsCapturing");
  find(d.library_load, "cuLibraryLoadData");
  find(d.library_kernel, "cuLibraryGetKernel");
  find(d.kernel_function, "cuKernelGetFunction");
  find(d.function_set_attribute, "cuFuncSetAttribute");
  find(d.launch_kernel, "cuLaunchKernelEx");
  find(d.encode_tensor_map, "cuTensorMapEncodeTiled");
  if (!d.missing.empty()) return d;
  if (const CuResult result = d.init(0); result != 0) d.missing = d.check(result, "cuInit").text;
  return d;
}

/// How many libraries this process has loaded since it began.
unsigned long long libraries_loaded() {
  unsigned long long count = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        *static_cast<unsigned long long*>(to) = info->dlpi_adds;
        return 1;  // the first one knows
      },
      &count);
  return count;
}

}  // namespace

Status Driver::check(CuResult result, const char* what) const {
  if (result == 0) return {};
  const char *name = nullptr, *text = nullptr;
  if (get_error_name(result, &name) != 0 || name == nullptr) name = "unknown error";
  if (get_error_string(result, &text) != 0 || text == nullptr)
    text = "the driver has no text for it";
  return Status::device(std::string(what) + ": " + name + " (" + std::to_string(result) +
                        "): " + text);
}

const Driver& driver() {
  static const Driver opened = open_driver();
  return opened;
}

bool driver_is_open() {
  // attend() asks for every tensor, and of a library that is not there dlopen looks for the file:
  // 20 us. So it looks again only when the process has loaded something since.
  static std::atomic<bool> open = false;
  static std::atomic<unsigned long long> looked_at = 0;
  if (open) return true;
  const unsigned long long loaded = libraries_loaded();
  if (looked_at == loaded) return false;
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) {
    looked_at = loaded;
    return false;
  }
  open = true;  // and it stays: this handle is never closed
  return true;
}

}  // namespace tessera::cuda
