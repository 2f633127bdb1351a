// measure_peaks on a GPU: what it reaches right now, on the yardstick of its architecture.
#include <algorithm>
#include <array>
#include <chrono>

#include "cuda/backend.h"
#include "cuda/code.h"
#include "cuda/context.h"
#include "cuda/memory.h"
#include "cuda/once.h"
#include "cuda/target.h"

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
struct LoadedYardstick {
  Once once;
  CuFunction multiply = nullptr, read = nullptr;
};

LoadedYardstick& loaded_on(const GpuDevice& device, Arch arch) {
  static std::array<std::array<LoadedYardstick, kArchs>, kMostDevices> all;
  return all[static_cast<std::size_t>(device.handle) % kMostDevices]
            [static_cast<std::size_t>(arch)];
}

Status load(LoadedYardstick& loaded, const Architecture& architecture, int capability) {
  CuLibrary library = nullptr;
  if (Status s = load_library(library, yardstick_program_of(architecture), capability, nullptr); !s)
    return s;
  Status status =
      load_function(loaded.multiply, library, "multiply_peak", architecture.yardstick.shared_bytes);
  return status ? load_function(loaded.read, library, "read_peak", 0) : status;
}

/// A kernel of the yardstick and what it is launched with.
struct Burst {
  CuFunction function = nullptr;
  int blocks = 0, threads = 0, shared_bytes = 0;
  void** arguments = nullptr;
  double units = 0.0;  ///< of work that a launch does
};

Status launch(const Burst& burst) {
  const CuLaunchConfig config = {static_cast<unsigned>(burst.blocks),
                                 1,
                                 1,
                                 static_cast<unsigned>(burst.threads),
                                 1,
                                 1,
                                 static_cast<unsigned>(burst.shared_bytes),
                                 nullptr,
                                 nullptr,
                                 0};
  return driver().check(driver().launch_kernel(&config, burst.function, burst.arguments, nullptr),
                        "cuLaunchKernelEx");
}

/// Units of work a second: the best of bursts of ten launches, for about `seconds`.
Result<double> best_rate(int ordinal, double seconds, const Burst& burst) {
  constexpr int kLaunches = 10;
  double best = 0.0;
  const Clock::time_point start = Clock::now();
  do {
    if (Status s = synchronize(ordinal, nullptr); !s) return s;
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kLaunches; ++i) {
      if (Status s = launch(burst); !s) return s;
    }
    if (Status s = synchronize(ordinal, nullptr); !s) return s;
    best = std::max(best, kLaunches * burst.units / seconds_since(begin));
  } while (seconds_since(start) < seconds);
  return best;
}

}  // namespace

Result<Peaks> measure_peaks(const Device& device, double seconds) {
  const Target* const target = target_of(device.arch);
  if (target == nullptr) {
    return Status::device("device = '" + device.name + "': no kernels here are for " +
                          to_string(device.arch));
  }
  const Yardstick& yardstick = target->architecture->yardstick;
  const int ordinal = device.ordinal;
  const CurrentContext context(ordinal);
  if (!context.status()) return context.status();
  LoadedYardstick& loaded = loaded_on(context.device(), device.arch);
  if (Status s = loaded.once(
          [&] { return load(loaded, *target->architecture, context.device().capability); });
      !s)
    return s;

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
  const Result<double> bf16 =
      best_rate(ordinal, seconds,
                {loaded.multiply, device.threads, yardstick.threads, yardstick.shared_bytes,
                 multiply_arguments, yardstick.round_operations * rounds * device.threads});
  if (!bf16) return bf16.status();
  peaks.bf16_flops = *bf16;

  std::int64_t count = kBytes / 16;
  std::uintptr_t start = data;
  void* read_arguments[] = {&start, &count, &never};
  constexpr int kBlocks = 8;  // of a multiprocessor
  const Result<double> bytes = best_rate(ordinal, seconds,
                                         {loaded.read, kBlocks * device.threads, yardstick.threads,
                                          0, read_arguments, static_cast<double>(kBytes)});
  if (!bytes) return bytes.status();
  peaks.read_bytes = *bytes;
  return peaks;
}

}  // namespace tessera::cuda
