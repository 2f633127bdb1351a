// ThreadPool, and the executors made from it. Every worker has a cache line of its own on which the
// caller rings; a ring names one call, and the caller waits until all rung workers have answered,
// so the call's data needs no further protection. A worker spins for kSpin after its last call,
// then sleeps in the kernel.
//
// fork(): a child has none of its parent's threads. Pools made before the fork notice and run
// everything on the calling thread; a child that wants threads makes a pool of its own.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/detect.h"
#include "cpu/turns.h"
#include "tessera/executor.hpp"

namespace tessera {

namespace {

/// Long enough to bridge the gap between the kernels of a model, short enough not to be noticed.
constexpr std::chrono::microseconds kSpin{50};

/// Returns once `value` differs from `old`: spins first, then sleeps.
std::uint32_t wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  constexpr int kLoadsPerClock = 64;
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kLoadsPerClock; ++i) {
      const std::uint32_t now = value.load(std::memory_order_acquire);
      if (now != old) return now;
      cpu::relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

/// How often this process is a fork of the one that loaded the library.
std::atomic<std::uint32_t> fork_depth{0};

std::uint32_t watch_forks() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_depth.fetch_add(1, std::memory_order_relaxed); });
  return fork_depth.load(std::memory_order_relaxed);
}

void run_inline(void* /*self*/, int num_workers, void (*work)(void* context, int worker),
                void* context) {
  for (int w = 0; w < num_workers; ++w) work(context, w);
}

/// While it lives, threads made by this one inherit a mask that leaves signals to the caller's
/// threads.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct ThreadPool::State {
  /// Where one worker thread is rung.
  struct alignas(64) Bell {
    std::atomic<std::uint32_t> rings{0};
  };

  explicit State(int num_threads) : bells(static_cast<std::size_t>(num_threads)) {}

  alignas(64) std::atomic<std::uint32_t> pending{0};  // rung workers that have not answered
  alignas(64) std::atomic<bool> taken{false};         // a call is in progress
  std::uint32_t depth = watch_forks();

  // The call in progress; written before the bells ring, read by rung workers only.
  void (*work)(void* context, int worker) = nullptr;
  void* context = nullptr;
  int num_workers = 0;
  bool stop = false;

  std::vector<Bell> bells;  // thread t's; 0 is the caller and is never rung
  std::vector<std::thread> threads;

  int num_threads() const { return static_cast<int>(threads.size()) + 1; }
  bool forked() const { return fork_depth.load(std::memory_order_relaxed) != depth; }

  /// Thread t's share of the call: more workers than threads are dealt out in turn.
  void share(int t) {
    for (int w = t; w < num_workers; w += num_threads()) work(context, w);
  }

  void ring(int t) {
    std::atomic<std::uint32_t>& rings = bells[static_cast<std::size_t>(t)].rings;
    rings.fetch_add(1);
    rings.notify_one();
  }

  void serve(int t) {
    const std::atomic<std::uint32_t>& rings = bells[static_cast<std::size_t>(t)].rings;
    for (std::uint32_t heard = 0;;) {
      heard = wait_for_change(rings, heard);
      if (stop) return;
      share(t);
      if (pending.fetch_sub(1) == 1) pending.notify_one();
    }
  }

  void call(int workers, void (*function)(void* context, int worker), void* argument) {
    work = function;
    context = argument;
    num_workers = workers;
    const int rung = (workers < num_threads() ? workers : num_threads()) - 1;
    pending.store(static_cast<std::uint32_t>(rung), std::memory_order_relaxed);
    for (int t = 1; t <= rung; ++t) ring(t);
    share(0);
    std::uint32_t left = pending.load(std::memory_order_acquire);
    while (left != 0) left = wait_for_change(pending, left);
  }

  static void run(void* self, int workers, void (*function)(void* context, int worker),
                  void* argument) {
    auto& state = *static_cast<State*>(self);
    // Taken: another thread's call is in progress, or this is a call from inside one.
    if (workers <= 1 || state.threads.empty() || state.forked() ||
        state.taken.exchange(true, std::memory_order_acquire)) {
      run_inline(nullptr, workers, function, argument);
      return;
    }
    state.call(workers, function, argument);
    state.taken.store(false, std::memory_order_release);
  }
};

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads <= 0) num_threads = cpu::usable_threads();
  state_ = std::make_unique<State>(num_threads);
  State& state = *state_;
  const BlockedSignals blocked;
  state.threads.reserve(static_cast<std::size_t>(num_threads) - 1);
  try {
    for (int t = 1; t < num_threads; ++t)
      state.threads.emplace_back([&state, t] { state.serve(t); });
  } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch)
    // The system grants no more threads: those that exist will do.
  }
}

ThreadPool::~ThreadPool() {
  State& state = *state_;
  if (state.forked()) {
    // There is nobody to join, and a std::thread that is neither joined nor detached must not die.
    [[maybe_unused]] const State* abandoned = state_.release();
    return;
  }
  state.stop = true;
  for (int t = 1; t < state.num_threads(); ++t) state.ring(t);
  for (std::thread& thread : state.threads) thread.join();
}

Executor ThreadPool::executor() { return {state_->num_threads(), state_.get(), State::run}; }

Executor inline_executor() { return {1, nullptr, run_inline}; }

Executor default_executor() {
  static ThreadPool pool;
  return pool.executor();
}

}  // namespace tessera
