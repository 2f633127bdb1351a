// Executor: where the worker threads come from. The library starts no thread when the caller passes
// one, so it can live inside torch's pool, OpenMP or TBB.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/export.h"

namespace tessera {

/// Runs one function on several workers. `run` must call work(context, w) exactly once for every
/// w in [0, num_workers), on any threads and in any order, and return when all have returned; it
/// may run them one after another. Results never depend on num_threads or on the order (S9).
struct Executor {
  int num_threads = 1;   ///< how many workers may run at the same time
  void* self = nullptr;  ///< passed to run
  /// See above; must not be null.
  void (*run)(void* self, int num_workers, void (*work)(void* context, int worker),
              void* context) = nullptr;
};

/// Threads that spin for a moment after each call and then sleep, so that back-to-back calls start
/// in well under a microsecond and an idle process uses no CPU. One caller at a time; a second
/// caller, or a call from inside a worker, runs its work inline.
class TESSERA_API ThreadPool {
 public:
  /// num_threads counts the calling thread; 0: one per hardware thread this process may use.
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Valid as long as the pool.
  Executor executor();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Runs everything on the calling thread.
TESSERA_API Executor inline_executor();

/// The process-wide pool used where the caller passes no executor; started on first use.
TESSERA_API Executor default_executor();

}  // namespace tessera
