// measure_peaks on a GPU: what it reaches right now, on the yardsticks of sm90/peak.h.
#include <algorithm>
#include <array>
#include <chrono>

#include "cuda/backend.h"
#include "cuda/code.h"
#include "cuda/context.h"
#include "cuda/memory.h"
#include "cuda/once.h"
#include "cuda/sm90/programs.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Memory of a GPU, freed at the end.
struct Memory {
  int ordinal = 0;
  void* data = nullptr;

  Memory() = default;
  ~Memory() {
    if (data != nullptr) deallocate(ordinal, data);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

/// The yardstick's kernels on a device, once they are loaded there.
struct Yardstick {
  Once once;
  CuFunction multiply = nullptr, read = nullptr;
};

Yardstick& yardstick(CuDevice device) {
  static std::array<Yardstick, kMostDevices> all;
  return all[static_cast<std::size_t>(device) % kMostDevices];
}

Status load(Yardstick& y) {
  Status status =
      load_function(y.multiply, sm90::kPeakSymbol, "multiply_peak", sm90::kPeakSharedBytes);
  return status ? load_function(y.read, sm90::kPeakSymbol, "read_peak", 0) : status;
}

Status launch(CuFunction function, int blocks, int shared_bytes, void** arguments) {
  const CuLaunchConfig config = {static_cast<unsigned>(blocks),
                                 1,
                                 1,
                                 sm90::kPeakThreads,
                                 1,
                                 1,
                                 static_cast<unsigned>(shared_bytes),
                                 nullptr,
                                 nullptr,
                                 0};
  return driver().check(driver().launch_kernel(&config, function, arguments, nullptr),
                        "cuLaunchKernelEx");
}

/// Units of work a second: the best of bursts of ten launches, for about `seconds`.
Result<double> best_rate(int ordinal, double seconds, CuFunction function, int blocks,
                         int shared_bytes, void** arguments, double units) {
  constexpr int kLaunches = 10;
  double best = 0.0;
  const Clock::time_point start = Clock::now();
  do {
    if (Status s = synchronize(ordinal, nullptr); !s) return s;
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kLaunches; ++i) {
      if (Status s = launch(function, blocks, shared_bytes, arguments); !s) return s;
    }
    if (Status s = synchronize(ordinal, nullptr); !s) return s;
    best = std::max(best, kLaunches * units / seconds_since(begin));
  } while (seconds_since(start) < seconds);
  return best;
}

}  // namespace

Result<Peaks> measure_peaks(const Device& device, double seconds) {
  const int ordinal = device.ordinal;
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  Yardstick& kernels = yardstick(context.device());
  if (Status s = kernels.once([&] { return load(kernels); }); !s) return s;

  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  Memory memory;
  memory.ordinal = ordinal;
  Result<void*> allocated = allocate(ordinal, kBytes);
  if (!allocated) return allocated.status();
  memory.data = *allocated;

  Peaks peaks;
  int rounds = 4096;
  // Each argument by its address.
  const auto data = reinterpret_cast<std::uintptr_t>(memory.data);
  std::uintptr_t never = data;
  void* multiply_arguments[] = {&rounds, &never};
  // Two warpgroups, four wgmmas of 64 x 256 x 16 a round.
  const double operations = 2.0 * 4 * (2.0 * 64 * 256 * 16) * rounds * device.threads;
  const Result<double> bf16 = best_rate(ordinal, seconds, kernels.multiply, device.threads,
                                        sm90::kPeakSharedBytes, multiply_arguments, operations);
  if (!bf16) return bf16.status();
  peaks.bf16_flops = *bf16;

  std::int64_t count = kBytes / 16;
  std::uintptr_t start = data;
  void* read_arguments[] = {&start, &count, &never};
  constexpr int kBlocks = 8;  // of a multiprocessor
  const Result<double> bytes = best_rate(ordinal, seconds, kernels.read, kBlocks * device.threads,
                                         0, read_arguments, static_cast<double>(kBytes));
  if (!bytes) return bytes.status();
  peaks.read_bytes = *bytes;
  return peaks;
}

}  // namespace tessera::cuda
