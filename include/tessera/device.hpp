// Device: the facts about a processor that planning needs, as a plain value, so that a plan for any
// machine can be made and tested on any other.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"
#include "tessera/status.hpp"
#include "tessera/types.hpp"

namespace tessera {

TESSERA_API const char* to_string(Arch arch);

/// Most Device::threads that plan() takes: more is a slip.
inline constexpr int kMaxThreads = 4096;

/// A processor as the planner sees it. Sizes in bytes.
struct Device {
  std::string name;            ///< as named_device() knows it
  Arch arch = Arch::portable;  ///< the largest instruction set it executes
  /// Workers the executor will offer, which never change a result. GPU: multiprocessors, by which
  /// decoding splits its keys and tiles are chosen, unless Problem::batch_invariant is asked for
  /// (S9).
  int threads = 1;
  std::int64_t l1_bytes = 32 << 10;  ///< per core; GPU: shared memory of one block
  std::int64_t l2_bytes = 1 << 20;   ///< per core; GPU: all of it
  int ordinal = 0;                   ///< GPU: its number in this process
  int capability = 0;                ///< GPU: what code is made for it, 90 for 9.0

  friend bool operator==(const Device&, const Device&) = default;
};

/// This machine's CPU: its best instruction set, its hardware threads, its caches.
TESSERA_API Device this_cpu();

/// The best instruction set this machine can execute.
TESSERA_API Arch best_arch();

/// A GPU of this machine, as CUDA numbers them. Where the environment's TESSERA_GPU_AS names one of
/// device_names(), it is planned for with that one's kernels and shared memory, if these kernels
/// run here: "a100" tries an A100's on a newer GPU. Errors: device (no driver, no such GPU, or one
/// that no kernel runs on; the text says which).
TESSERA_API Result<Device> this_gpu(int ordinal = 0);

/// The newest CUDA version that this machine's NVIDIA driver serves, e.g. "13.0". Errors: device
/// (no driver).
TESSERA_API Result<std::string> driver_version();

/// Looks a device up by name ("cpu" is this machine, "gpu" its first GPU, "gpu:1" the second;
/// device_names() lists the rest); an instruction set's name ("avx2") is this CPU restricted to it.
TESSERA_API Result<Device> named_device(std::string_view name);
TESSERA_API std::vector<std::string> device_names();

}  // namespace tessera
