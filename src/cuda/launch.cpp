// A run on a GPU: context, kernels, launches. Allocates nothing and waits for nothing; a kernel's
// code is loaded by its first launch.
#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <mutex>
#include <string>

#include "cuda/backend.h"
#include "cuda/code.h"
#include "cuda/context.h"
#include "cuda/sm90/shape.h"
#include "cuda/symbol.h"
#include "plan/catalog.h"

namespace tessera::cuda {
namespace {

/// A kernel on a device, once it is loaded there.
struct Loaded {
  std::once_flag once;
  Status status;
  CuFunction function = nullptr;
};

constexpr const char* kRowsNames[kRowsKernels] = {
    "prepare_rows_bf16", "prepare_rows_f16", "finish_rows_bf16", "finish_rows_f16",
    "sum_sinks",         "begin_bias",       "finish_bias"};

Loaded& place_of(CuDevice device, std::size_t index) {
  static std::array<std::array<Loaded, std::size(kCatalog) + kRowsKernels>, kMostDevices> all;
  return all[static_cast<std::size_t>(device) % kMostDevices][index];
}

const Loaded& load(const core::Kernel& row, CuDevice device) {
  const auto at = static_cast<std::size_t>(
      std::find(std::begin(kCatalog), std::end(kCatalog), row) - std::begin(kCatalog));
  Loaded& loaded = place_of(device, at);
  std::call_once(loaded.once, [&] {
    const std::string symbol = symbol_of(row);
    loaded.status = load_function(loaded.function, symbol, symbol.c_str(), sm90::shared_bytes(row));
  });
  return loaded;
}

const Loaded& load(RowsKernel kernel, CuDevice device) {
  const auto index = static_cast<std::size_t>(kernel);
  Loaded& loaded = place_of(device, std::size(kCatalog) + index);
  std::call_once(loaded.once, [&] {
    loaded.status = load_function(loaded.function, kBackwardRowsSymbol, kRowsNames[index], 0);
  });
  return loaded;
}

Status enqueue(const Loaded& loaded, std::int64_t blocks, int threads, int shared_bytes,
               CuStream stream, const void* params) {
  if (!loaded.status) return loaded.status;
  const CuLaunchConfig config = {static_cast<unsigned>(blocks),
                                 1,
                                 1,
                                 static_cast<unsigned>(threads),
                                 1,
                                 1,
                                 static_cast<unsigned>(shared_bytes),
                                 stream,
                                 nullptr,
                                 0};
  void* arguments[] = {const_cast<void*>(params)};
  const Driver& d = driver();
  return d.check(d.launch_kernel(&config, loaded.function, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace

Status Queue::launch(const core::Kernel& row, std::int64_t blocks, const void* params) const {
  return enqueue(load(row, device), blocks, sm90::threads(row), sm90::shared_bytes(row), stream,
                 params);
}

Status Queue::launch(RowsKernel kernel, std::int64_t blocks, const void* params) const {
  return enqueue(load(kernel, device), blocks, sm90::kRowThreads, 0, stream, params);
}

Status run(const PlanData& plan, const Tensors& tensors, void* workspace,
           const Execution& execution) {
  if (!driver().available()) return Status::device(driver().missing);
  const CurrentContext context(plan.device.ordinal);
  if (!context.status()) return context.status();
  const Queue queue = {context.device(), static_cast<CuStream>(execution.stream)};
  return plan.problem.pass == Pass::forward ? run_forward(plan, tensors, queue)
                                            : run_backward(plan, tensors, workspace, queue);
}

}  // namespace tessera::cuda
