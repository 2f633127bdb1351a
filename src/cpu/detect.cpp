// Detection, done once: cpuid for the instruction sets and the name, sysfs for the caches, the
// affinity mask for the threads.
#include "cpu/detect.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tessera::cpu {

namespace {

#if defined(__x86_64__)

/// The 48 characters of the extended leaves, trimmed.
std::string machine_name() {
  unsigned words[12] = {};
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned* w = words + std::size_t{leaf} * 4;
    if (__get_cpuid(0x80000002U + leaf, &w[0], &w[1], &w[2], &w[3]) == 0) return {};
  }
  char text[sizeof words + 1] = {};
  std::memcpy(text, words, sizeof words);
  const std::string name = text;
  const std::size_t begin = name.find_first_not_of(' ');
  if (begin == std::string::npos) return {};
  return name.substr(begin, name.find_last_not_of(' ') - begin + 1);
}

#else

std::string machine_name() { return {}; }

#endif

/// First line of a small file; empty if there is none.
std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// "48K" or "1M" in bytes; 0 if it is neither.
std::int64_t bytes_of(const std::string& text) {
  char* end = nullptr;
  const std::int64_t number = std::strtoll(text.c_str(), &end, 10);
  if (end == text.c_str() || number <= 0) return 0;
  return *end == 'K' ? number << 10 : *end == 'M' ? number << 20 : number;
}

/// Data cache of one level; `fallback` where the system does not tell.
std::int64_t cache_bytes(int level, int sysconf_name, std::int64_t fallback) {
  for (int index = 0; index < 8; ++index) {
    const std::string folder =
        "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    if (line_of(folder + "level") != std::to_string(level)) continue;
    if (line_of(folder + "type") == "Instruction") continue;
    if (const std::int64_t bytes = bytes_of(line_of(folder + "size")); bytes > 0) return bytes;
  }
  const long bytes = sysconf(sysconf_name);
  return bytes > 0 ? bytes : fallback;
}

Device detect() {
  Device device;
  const std::string name = machine_name();
  device.name = name.empty() ? "cpu" : name;
  device.arch = best_arch();
  device.threads = usable_threads();
  device.l1_bytes = cache_bytes(1, _SC_LEVEL1_DCACHE_SIZE, device.l1_bytes);
  device.l2_bytes = cache_bytes(2, _SC_LEVEL2_CACHE_SIZE, device.l2_bytes);
  return device;
}

}  // namespace

Arch machine_arch() {
#if defined(__x86_64__)
  // The compiler's run-time also asks whether the system saves ymm and zmm registers (XCR0).
  __builtin_cpu_init();
  const auto has = [](int supported) { return supported != 0; };
  if (!has(__builtin_cpu_supports("avx2")) || !has(__builtin_cpu_supports("fma")) ||
      !has(__builtin_cpu_supports("f16c"))) {
    return Arch::portable;
  }
  if (!has(__builtin_cpu_supports("avx512f")) || !has(__builtin_cpu_supports("avx512bw")) ||
      !has(__builtin_cpu_supports("avx512dq")) || !has(__builtin_cpu_supports("avx512vl"))) {
    return Arch::avx2;
  }
  const bool bf16 = has(__builtin_cpu_supports("avx512bf16"));
  return bf16 && has(__builtin_cpu_supports("avx512vbmi")) ? Arch::avx512_bf16 : Arch::avx512;
#else
  return Arch::portable;
#endif
}

int usable_threads() {
#if defined(__linux__)
  // The kernel refuses a mask shorter than its own; double until it fits.
  for (std::size_t cpus = 1024; cpus <= (std::size_t{1} << 20); cpus *= 2) {
    std::vector<unsigned long> mask(cpus / (8 * sizeof(unsigned long)));
    const std::size_t bytes = mask.size() * sizeof(unsigned long);
    auto* const set = reinterpret_cast<cpu_set_t*>(mask.data());
    if (sched_getaffinity(0, bytes, set) == 0) {
      const int count = CPU_COUNT_S(bytes, set);
      return count > 0 ? count : 1;
    }
  }
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

}  // namespace tessera::cpu

namespace tessera {

Arch best_arch() {
  // Instruction sets that this build has no kernels for are of no use to a plan.
  constexpr Arch built =
#if defined(TESSERA_HAVE_AVX512_BF16)
      Arch::avx512_bf16;
#elif defined(TESSERA_HAVE_AVX512)
      Arch::avx512;
#elif defined(TESSERA_HAVE_AVX2)
      Arch::avx2;
#else
      Arch::portable;
#endif
  static const Arch machine = cpu::machine_arch();
  return machine < built ? machine : built;
}

Device this_cpu() {
  static const Device device = cpu::detect();
  return device;
}

}  // namespace tessera
