#include "check/sweep.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "check/check.h"

namespace tessera::tools {
namespace {

Device device_of(const Case& item) {
  Device device = this_cpu();
  device.arch = item.arch;
  device.threads = item.threads;
  return device;
}

/// What the workers share.
class Sweep {
 public:
  Sweep(const SweepOptions& options, std::vector<Case> cases)
      : options_(options), cases_(std::move(cases)) {}

  void work() {
    for (;;) {
      const std::size_t index = next_.fetch_add(1);
      if (index >= cases_.size()) return;
      const Case& item = cases_[index];
      if (options_.trace && options_.log != nullptr) {
        std::fprintf(options_.log, "%s\n", item.command().c_str());
        std::fflush(options_.log);
      }
      const CheckResult result = check(item.problem, item.seed(), device_of(item), item.in_reverse);
      report(item, result);
    }
  }

  SweepResult result() && { return std::move(result_); }

 private:
  void report(const Case& item, const CheckResult& result) {
    const std::lock_guard lock(mutex_);
    if (result.pass()) {
      ++result_.passed;
    } else {
      result_.failures.push_back(item.command() + "\n    " + result.kernel + ": " +
                                 result.summary());
      if (options_.log != nullptr) {
        std::fprintf(options_.log, "FAILED  %s\n", result_.failures.back().c_str());
      }
    }
    const std::size_t done = static_cast<std::size_t>(result_.passed) + result_.failures.size();
    if (options_.log != nullptr && (done % 2000 == 0 || done == cases_.size())) {
      std::fprintf(options_.log, "%zu of %zu checked, %zu failed\n", done, cases_.size(),
                   result_.failures.size());
      std::fflush(options_.log);
    }
  }

  const SweepOptions& options_;
  const std::vector<Case> cases_;
  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  SweepResult result_;
};

}  // namespace

SweepResult sweep(const SweepOptions& options) {
  std::vector<Case> list;
  int part = 0;
  const Random inputs(options.input_seed, 2);
  for (Case& item : cases(options.seed, options.count, options.best)) {
    item.random = (item.random + inputs.bits(0)) >> 40;
    const bool chosen = part == options.part;
    part = (part + 1) % options.parts;
    if (chosen && item.command().find(options.filter) != std::string::npos) list.push_back(item);
  }
  Sweep sweep(options, std::move(list));
  const int wanted =
      options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int i = 1; i < wanted; ++i) threads.emplace_back([&sweep] { sweep.work(); });
  sweep.work();
  for (std::thread& thread : threads) thread.join();
  return std::move(sweep).result();
}

}  // namespace tessera::tools
