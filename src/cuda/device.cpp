// GPUs as the planner sees them.
#include "cuda/backend.h"
#include "cuda/driver.h"
#include "cuda/target.h"

namespace tessera::cuda {
namespace {

/// Null: none runs there.
const Target* target_on(int compute_major, int compute_minor) {
  for (const Target& target : targets()) {
    if (target.runs_on(compute_major, compute_minor)) return &target;
  }
  return nullptr;
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
  const Target* const target = target_on(major, minor);
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
  return device;
}

Result<std::string> driver_version() {
  const Driver& d = driver();
  if (!d.available()) return Status::device(d.missing);
  int version = 0;
  if (Status s = d.check(d.driver_version(&version), "cuDriverGetVersion"); !s) return s;
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace tessera::cuda
