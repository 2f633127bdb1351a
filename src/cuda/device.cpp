// GPUs as the planner sees them.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/code.h"
#include "cuda/compiler/environment.h"
#include "cuda/driver.h"
#include "cuda/target.h"
#include "plan/device_table.h"

namespace tessera::cuda {
namespace {

/// The device as $TESSERA_GPU_AS wants it to be planned for. Errors: device (it names no GPU, or
/// one whose kernels do not run here).
Result<Device> pretended(const Device& real, const std::string& name) {
  for (const Device& device : device_table()) {
    if (device.name != name || !is_gpu(device.arch)) continue;
    if (!target_of(device.arch)->runs_on(real.capability)) {
      return Status::device("TESSERA_GPU_AS = '" + name + "': " + real.name +
                            " does not run kernels of " + to_string(device.arch));
    }
    Device planned = real;
    planned.name = device.name + " (" + real.name + ")";
    planned.arch = device.arch;
    planned.l1_bytes = std::min(device.l1_bytes, real.l1_bytes);
    return planned;
  }
  std::string known;
  for (const Device& device : device_table()) {
    if (is_gpu(device.arch)) known += (known.empty() ? "" : ", ") + device.name;
  }
  return Status::device("TESSERA_GPU_AS = '" + name + "': unknown; known: " + known);
}

std::string all_devices() {
  std::string text;
  for (const Target& target : targets())
    text += (text.empty() ? "" : "; ") + std::string(target.devices);
  return text;
}

}  // namespace

Result<Device> device_at(int ordinal) {
  const Driver& d = driver();
  if (!d.available()) return Status::device(d.missing);
  int count = 0;
  if (Status s = d.check(d.device_count(&count), "cuDeviceGetCount"); !s) return s;
  if (ordinal < 0 || ordinal >= count) {
    return Status::device("device = 'gpu:" + std::to_string(ordinal) + "': this machine has " +
                          std::to_string(count) + (count == 1 ? " GPU" : " GPUs"));
  }
  CuDevice handle = 0;
  if (Status s = d.check(d.device_get(&handle, ordinal), "cuDeviceGet"); !s) return s;
  char name[256] = {};
  if (Status s = d.check(d.device_name(name, sizeof name, handle), "cuDeviceGetName"); !s) return s;
  int major = 0, minor = 0, multiprocessors = 0, shared = 0, l2 = 0;
  const struct {
    int* value;
    int attribute;
  } facts[] = {{&major, kComputeMajor},
               {&minor, kComputeMinor},
               {&multiprocessors, kMultiprocessorCount},
               {&shared, kSharedBytesOptin},
               {&l2, kL2Bytes}};
  for (const auto& fact : facts) {
    if (Status s =
            d.check(d.device_attribute(fact.value, fact.attribute, handle), "cuDeviceGetAttribute");
        !s) {
      return s;
    }
  }
  const int capability = 10 * major + minor;
  const Target* const target = target_on(capability, has_code);
  if (target == nullptr) {
    return Status::device("device = 'gpu:" + std::to_string(ordinal) + "': " + name +
                          " has compute capability " + std::to_string(major) + "." +
                          std::to_string(minor) + "; the kernels are for " + all_devices());
  }
  Device device;
  device.name = name;
  device.arch = target->architecture->arch;
  device.threads = multiprocessors;
  device.l1_bytes = shared;
  device.l2_bytes = l2;
  device.ordinal = ordinal;
  device.capability = capability;
  if (const Arch own = own_target(capability)->architecture->arch; own != device.arch) {
    device.name += std::string(" (there is no code of ") + to_string(own) +
                   " here: see TESSERA_CUDA_ARCHS, or pip install nvidia-cuda-nvrtc)";
  }
  const std::string as = environment("TESSERA_GPU_AS");
  return as.empty() ? device : pretended(device, as);
}

Result<std::string> driver_version() {
  const Driver& d = driver();
  if (!d.available()) return Status::device(d.missing);
  int version = 0;
  if (Status s = d.check(d.driver_version(&version), "cuDriverGetVersion"); !s) return s;
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace tessera::cuda
