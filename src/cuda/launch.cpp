// A run on a GPU: context, kernels, launches. Allocates nothing and waits for nothing; a kernel's
// code is loaded by its first launch.
#include "cuda/launch.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/storage.h"
#include "cuda/backend.h"
#include "cuda/code.h"
#include "cuda/context.h"
#include "cuda/once.h"
#include "cuda/target.h"
#include "plan/catalog.h"
#include "plan/names.h"

namespace tessera::cuda {
namespace {

/// A kernel on a device, once it is loaded there.
struct Loaded {
  Once once;
  CuFunction function = nullptr;
};

/// What an architecture has beside its rows: one library.
struct LoadedLibrary {
  Once once;
  CuLibrary library = nullptr;
};

/// Whether the driver captures launches that begin early: CUDA 12.3.
bool launches_early() {
  static const bool known = [] {
    int version = 0;
    return driver().driver_version(&version) == 0 && version >= 12030;
  }();
  return known;
}

/// begins_early: before what was enqueued before it is done; its kernel waits for that by itself.
Status enqueue(CuFunction function, std::int64_t blocks, int threads, int shared_bytes,
               CuStream stream, const void* params, bool begins_early) {
  begins_early = begins_early && launches_early();
  CuLaunchAttribute early = {kProgrammaticSerialization, 1, {}};
  const CuLaunchConfig config = {static_cast<unsigned>(blocks),
                                 1,
                                 1,
                                 static_cast<unsigned>(threads),
                                 1,
                                 1,
                                 static_cast<unsigned>(shared_bytes),
                                 stream,
                                 begins_early ? &early : nullptr,
                                 begins_early ? 1U : 0U};
  void* arguments[] = {const_cast<void*>(params)};
  const Driver& d = driver();
  return d.check(d.launch_kernel(&config, function, arguments, nullptr), "cuLaunchKernelEx");
}

Status nobody_launches(const PlanData& plan) {
  return Status::device("kernel = " + plan.kernel_name + ": nothing here launches it");
}

}  // namespace

Result<CuFunction> Queue::load(const core::Kernel& row) const {
  static std::array<std::array<Loaded, kCatalog.size()>, kMostDevices> all;
  const core::Kernel* const found = std::find(kCatalog.begin(), kCatalog.end(), row);
  if (found == kCatalog.end()) {
    return Status::device("kernel = " + name_of(row) + ": is not a row of the catalog");
  }
  Loaded& loaded = all[static_cast<std::size_t>(device.handle) % kMostDevices]
                      [static_cast<std::size_t>(found - kCatalog.begin())];
  Status status = loaded.once([&] {
    const Program program = program_of(*architecture, row);
    CuLibrary library = nullptr;
    if (Status s = load_library(library, program, device.capability, stream); !s) return s;
    return load_function(loaded.function, library, program.symbol.c_str(),
                         architecture->shared_bytes(row));
  });
  if (!status) return status;
  return loaded.function;
}

Result<CuFunction> Queue::load_auxiliary(std::size_t number) const {
  constexpr std::size_t kMost = 32;  // of an architecture
  static std::array<std::array<std::array<Loaded, kMost>, kMostDevices>, kArchs> all;
  static std::array<std::array<LoadedLibrary, kMostDevices>, kArchs> libraries;
  if (number >= architecture->auxiliary.size() || number >= kMost) {
    return Status::device("auxiliary kernel = " + std::to_string(number) + ": there is none");
  }
  const auto arch = static_cast<std::size_t>(architecture->arch),
             at = static_cast<std::size_t>(device.handle) % kMostDevices;
  LoadedLibrary& code = libraries[arch][at];
  Loaded& loaded = all[arch][at][number];
  Status status = loaded.once([&] {
    Status s = code.once([&] {
      return load_library(code.library, auxiliary_program_of(*architecture), device.capability,
                          stream);
    });
    if (!s) return s;
    return load_function(loaded.function, code.library, architecture->auxiliary[number].name, 0);
  });
  if (!status) return status;
  return loaded.function;
}

Status Queue::launch(const core::Kernel& row, std::int64_t blocks, const void* params) const {
  const Result<CuFunction> function = load(row);
  if (!function) return function.status();
  return enqueue(*function, blocks, architecture->threads(row), architecture->shared_bytes(row),
                 stream, params, architecture->begins_early && core::waits_for_grids(row));
}

Status Queue::launch_auxiliary(std::size_t number, std::int64_t blocks, const void* params) const {
  const Result<CuFunction> function = load_auxiliary(number);
  if (!function) return function.status();
  return enqueue(*function, blocks, kAuxiliaryThreads, 0, stream, params,
                 architecture->begins_early && architecture->auxiliary[number].begins_early);
}

Status Queue::clear(std::int32_t* counter) const {
  const Driver& d = driver();
  return d.check(d.set_memory_async(reinterpret_cast<std::uintptr_t>(counter), 0, 1, stream),
                 "cuMemsetD32Async");
}

Status prepare(const PlanData& plan) {
  if (!driver().available()) return Status::device(driver().missing);
  const Target* const target = target_of(plan.kernel.arch);
  if (target == nullptr) return nobody_launches(plan);
  const CurrentContext context(plan.device.ordinal);
  if (!context.status()) return context.status();
  const Queue queue = {target->architecture, context.device(), nullptr};
  if (const auto function = queue.load(plan.kernel); !function) return function.status();
  for (std::size_t i = 0; i < target->architecture->auxiliary.size(); ++i) {
    if (const auto function = queue.load_auxiliary(i); !function) return function.status();
  }
  return {};
}

Result<std::size_t> compile_ahead(const PlanData& plan) {
  const Target* const target = target_of(plan.kernel.arch);
  if (target == nullptr) return nobody_launches(plan);
  if (plan.device.capability == 0) {
    return Status::invalid(
        "device.capability = 0: must be that of the GPU to compile for, 90 for 9.0");
  }
  std::size_t compiled = 0;
  for (const Program& program : {program_of(*target->architecture, plan.kernel),
                                 auxiliary_program_of(*target->architecture)}) {
    if (Status s = compile_ahead(program, plan.device.capability, compiled); !s) return s;
  }
  return compiled;
}

Status run(const PlanData& plan, const Tensors& tensors, void* workspace,
           const Execution& execution) {
  if (!driver().available()) return Status::device(driver().missing);
  const Target* const target = target_of(plan.kernel.arch);
  if (target == nullptr) return nobody_launches(plan);
  const CurrentContext context(plan.device.ordinal);
  if (!context.status()) return context.status();
  const Queue queue = {target->architecture, context.device(),
                       static_cast<CuStream>(execution.stream)};
  return plan.problem.pass == Pass::forward ? target->run_forward(plan, tensors, workspace, queue)
                                            : target->run_backward(plan, tensors, workspace, queue);
}

}  // namespace tessera::cuda
