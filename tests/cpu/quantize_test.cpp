// Quantising on the CPU: every instruction set against literal loops, what attention makes of the
// results, and wrong arguments.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "archs.h"
#include "quantized.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

class Quantize : public testing::Test {
 protected:
  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

// Types, layouts, scalings, rotary embedding, transforms, tiles: any of it with any of it, and
// numbers that are none. What lies between rows stays as it was.
TEST_F(Quantize, EveryBitIsThatOfTheLiteralLoops_S14) {
  Device device = this_cpu();
  for (int trial = 0; trial < (kSanitized ? 60 : 600); ++trial) {
    Quantized quantized(random_, false);
    for (const Arch arch : archs()) {
      device.arch = arch;
      quantized.clear();
      const std::string what = quantized.text() + " " + to_string(arch);
      const Status status = quantize(quantized.shape, quantized.tensors, device);
      ASSERT_TRUE(status) << status.text << "; " << what;
      quantized.check(what);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace tessera
