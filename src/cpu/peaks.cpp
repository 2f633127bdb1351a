// measure_peaks: what this machine reaches right now, on the yardsticks of peak.h.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "cpu/backend.h"
#include "cpu/isa.h"

namespace tessera::cpu {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Runs body(worker) on all workers and returns the seconds until the last was done.
template <class Body>
double timed(const Executor& executor, int workers, const Body& body) {
  const auto work = [](void* context, int worker) { (*static_cast<const Body*>(context))(worker); };
  const Clock::time_point start = Clock::now();
  executor.run(executor.self, workers, work, const_cast<Body*>(&body));
  return seconds_since(start);
}

/// Operations a second of all workers together; the best of repeated bursts of about 2 ms.
double burst_rate(const Executor& executor, int workers, double seconds,
                  double (*burst)(std::int64_t rounds)) {
  if (burst(1) == 0.0) return 0.0;
  constexpr std::int64_t kRounds = 1 << 18;
  double best = 0.0;
  const Clock::time_point start = Clock::now();
  do {
    std::atomic<double> operations = 0.0;
    const double elapsed = timed(executor, workers, [&](int) { operations += burst(kRounds); });
    best = std::max(best, operations / elapsed);
  } while (seconds_since(start) < seconds);
  return best;
}

/// Bytes a second of all workers together, from memory far larger than the caches.
double read_rate(const Executor& executor, int workers, double seconds, const Isa& isa) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20;
  const std::vector<std::byte> memory(static_cast<std::size_t>(kBytes), std::byte{1});
  const std::int64_t share = kBytes / workers;
  double best = 0.0;
  const Clock::time_point start = Clock::now();
  do {
    const double elapsed = timed(executor, workers, [&](int worker) {
      isa.read_sweep(memory.data() + worker * share, share);
    });
    best = std::max(best, static_cast<double>(share * workers) / elapsed);
  } while (seconds_since(start) < seconds);
  return best;
}

}  // namespace

Result<Peaks> measure_peaks(const Device& device, double seconds, const Executor* executor) {
  const Isa* isa = runs(best_arch(), device.arch) ? isa_of(device.arch) : nullptr;
  if (isa == nullptr) {
    return Status::device("device = '" + device.name + "': this machine, with this build, runs " +
                          to_string(best_arch()) + " at most");
  }
  if (executor != nullptr && executor->run == nullptr) {
    return Status::invalid("executor.run = null");
  }
  const Executor pool = executor != nullptr ? *executor : default_executor();
  const int workers = std::max(1, std::min(pool.num_threads, device.threads));
  Peaks peaks;
  peaks.f32_flops = burst_rate(pool, workers, seconds, isa->f32_burst);
  peaks.bf16_flops = burst_rate(pool, workers, seconds, isa->bf16_burst);
  peaks.read_bytes = read_rate(pool, workers, seconds, *isa);
  return peaks;
}

}  // namespace tessera::cpu
