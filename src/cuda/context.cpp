#include "cuda/context.h"

#include <array>
#include <utility>

#include "cuda/once.h"

namespace tessera::cuda {
namespace {

struct Primary {
  Once once;
  GpuDevice device;
  CuContext context = nullptr;
};

Status retain(Primary& p, int ordinal) {
  const Driver& d = driver();
  if (!d.available()) return Status::device(d.missing);
  Status status = d.check(d.device_get(&p.device.handle, ordinal), "cuDeviceGet");
  int major = 0, minor = 0;
  for (const auto& [value, attribute] :
       {std::pair{&major, kComputeMajor}, {&minor, kComputeMinor}}) {
    if (!status) return status;
    status = d.check(d.device_attribute(value, attribute, p.device.handle), "cuDeviceGetAttribute");
  }
  if (!status) return status;
  p.device.capability = 10 * major + minor;
  return d.check(d.primary_context_retain(&p.context, p.device.handle), "cuDevicePrimaryCtxRetain");
}

}  // namespace

CurrentContext::CurrentContext(int ordinal) {
  static std::array<Primary, kMostDevices> all;
  if (ordinal < 0 || ordinal >= static_cast<int>(kMostDevices)) {
    status_ = Status::device("device.ordinal = " + std::to_string(ordinal) + ": no such GPU");
    return;
  }
  Primary& p = all[static_cast<std::size_t>(ordinal)];
  status_ = p.once([&] { return retain(p, ordinal); });
  if (!status_) return;
  device_ = p.device;
  CuContext current = nullptr;
  if (driver().context_current(&current) == 0 && current == p.context) return;
  status_ = driver().check(driver().context_push(p.context), "cuCtxPushCurrent");
  pushed_ = status_.ok();
}

CurrentContext::~CurrentContext() {
  CuContext context = nullptr;
  if (pushed_) driver().context_pop(&context);
}

}  // namespace tessera::cuda
