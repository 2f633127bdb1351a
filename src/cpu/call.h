// What a CPU kernel is given, and how its work is shared out. Included by every instruction set's
// translation unit; no out-of-line code.
#pragma once

#include <atomic>

#include "plan/layout.h"

namespace tessera::cpu {

/// One run of one plan.
struct Call {
  const PlanData& plan;
  const Tensors& tensors;
  const PlanLayout& layout;
  Executor executor;
  void (*progress)(void* context, std::int64_t done, std::int64_t total);
  void* progress_context;

  /// Scratch memory of a worker.
  std::byte* scratch(int worker) const { return layout.workers + worker * layout.worker_bytes; }
  int most_workers() const { return plan.device.threads; }
};

/// A merge of partial results.
struct CombineCall {
  const PartialResults& results;
  const PartialTensors& tensors;
  int threads;  ///< of the device
  Executor executor;
  void (*progress)(void* context, std::int64_t done, std::int64_t total);
  void* progress_context;

  int most_workers() const { return threads; }
};

/// What goes row by row from tensors to tensors.
template <class Shape, class ItsTensors>
struct RowsCall {
  const Shape& shape;
  const ItsTensors& tensors;
  int threads;  ///< of the device
  Executor executor;
  void (*progress)(void* context, std::int64_t done, std::int64_t total);
  void* progress_context;

  int most_workers() const { return threads; }
};
using AppendCall = RowsCall<AppendShape, AppendTensors>;
using QuantizeCall = RowsCall<QuantizeShape, QuantizeTensors>;

/// A kernel: a whole pass, all its phases.
using KernelFunction = void (*)(const Call& call);

/// Calls task(index, worker) for every index in [0, count). Indices are handed out in increasing
/// order, so a task may wait for one with a smaller index: that one has been started and will
/// finish. AnyCall: Call, CombineCall or a
/// RowsCall.
template <class AnyCall, class Task>
inline __attribute__((always_inline)) void for_each_task(const AnyCall& call, std::int64_t count,
                                                         const Task& task) {
  struct Shared {
    const AnyCall& call;
    const Task& task;
    std::int64_t count;
    std::atomic<std::int64_t> next;
  } shared{call, task, count, {0}};
  const auto work = [](void* context, int worker) {
    auto& s = *static_cast<Shared*>(context);
    for (;;) {
      const std::int64_t index = s.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= s.count) return;
      s.task(index, worker);
      if (worker == 0 && s.call.progress != nullptr) {
        s.call.progress(s.call.progress_context, index + 1, s.count);
      }
    }
  };
  const int limit = call.most_workers();
  int workers = call.executor.num_threads < limit ? call.executor.num_threads : limit;
  if (count < workers) workers = static_cast<int>(count);
  if (workers <= 1) {
    if (count > 0) work(&shared, 0);
    return;
  }
  call.executor.run(call.executor.self, workers, work, &shared);
}

}  // namespace tessera::cpu
