// A driver that comes into the process after somebody has asked for it is seen: programs open it
// when they please, and attend() must know from then on where tensors lie. A program of its own, as
// the other tests have the fake driver from the beginning. late_driver LIBRARY
#include <dlfcn.h>

#include <cstdio>

#include "cuda/driver.h"

namespace {

bool expect(bool open, const char* when) {
  if (tessera::cuda::driver_is_open() == open) return true;
  std::fprintf(stderr, "%s the driver is %s\n", when, open ? "not seen" : "seen");
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  bool good = expect(false, "at first") && expect(false, "at the second look");
  if (dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  good = good && expect(true, "once it is there") && expect(true, "later");
  return good ? 0 : 1;
}
