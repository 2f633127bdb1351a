#include "cuda/context.h"

#include <array>
#include <mutex>

namespace tessera::cuda {
namespace {

struct Primary {
  std::once_flag once;
  Status status;
  CuDevice device = 0;
  CuContext context = nullptr;
};

/// Null: no such number.
const Primary* primary(int ordinal) {
  static std::array<Primary, kMostDevices> all;
  if (ordinal < 0 || ordinal >= static_cast<int>(kMostDevices)) return nullptr;
  Primary& p = all[static_cast<std::size_t>(ordinal)];
  std::call_once(p.once, [&] {
    const Driver& d = driver();
    if (!d.available()) {
      p.status = Status::device(d.missing);
      return;
    }
    p.status = d.check(d.device_get(&p.device, ordinal), "cuDeviceGet");
    if (!p.status) return;
    p.status = d.check(d.primary_context_retain(&p.context, p.device), "cuDevicePrimaryCtxRetain");
  });
  return &p;
}

}  // namespace

CurrentContext::CurrentContext(int ordinal) {
  const Primary* p = primary(ordinal);
  if (p == nullptr) {
    status_ = Status::device("device.ordinal = " + std::to_string(ordinal) + ": no such GPU");
    return;
  }
  status_ = p->status;
  if (!status_) return;
  device_ = p->device;
  CuContext current = nullptr;
  if (driver().context_current(&current) == 0 && current == p->context) return;
  status_ = driver().check(driver().context_push(p->context), "cuCtxPushCurrent");
  pushed_ = status_.ok();
}

CurrentContext::~CurrentContext() {
  CuContext context = nullptr;
  if (pushed_) driver().context_pop(&context);
}

}  // namespace tessera::cuda
