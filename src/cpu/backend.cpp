// Dispatch: from a plan's catalog row to the kernel that this build has for it.
#include "cpu/backend.h"

#include "cpu/isa.h"

namespace tessera::cpu {
namespace {

/// The caller's, or the library's own.
Result<Executor> executor_of(const Execution& execution) {
  if (execution.executor == nullptr) return default_executor();
  if (execution.executor->run == nullptr) return Status::invalid("executor.run = null");
  return *execution.executor;
}

/// The instruction set's table, for `what`.
Result<const Isa*> runnable(const Device& device, const char* what) {
  const Isa* const isa = runs(best_arch(), device.arch) ? isa_of(device.arch) : nullptr;
  if (isa != nullptr) return isa;
  return Status::device(std::string(what) + " for " + to_string(device.arch) +
                        ": this machine, with this build, runs " + to_string(best_arch()) +
                        " at most");
}

/// Calls the instruction set's function of rows for `what`.
template <class ItsCall, class Shape, class ItsTensors>
Status call(void (*Isa::*function)(const ItsCall& call), const char* what, const Shape& shape,
            const ItsTensors& tensors, const Device& device, const Execution& execution) {
  if (const Result<const Isa*> isa = runnable(device, what); !isa) return isa.status();
  const Result<Executor> executor = executor_of(execution);
  if (!executor) return executor.status();
  (isa_of(row_set_of(device.arch))->*function)(
      {shape, tensors, device.threads, *executor, execution.progress, execution.progress_context});
  return {};
}

}  // namespace

const Isa* isa_of(Arch arch) {
  switch (arch) {
#if defined(TESSERA_HAVE_PORTABLE)
    case Arch::portable: return &portable::kIsa;
#endif
#if defined(TESSERA_HAVE_AVX2)
    case Arch::avx2: return &avx2::kIsa;
#endif
#if defined(TESSERA_HAVE_AVX512)
    case Arch::avx512: return &avx512::kIsa;
#endif
#if defined(TESSERA_HAVE_AVX512_BF16)
    case Arch::avx512_bf16: return &avx512_bf16::kIsa;
#endif
    default: return nullptr;
  }
}

Status run(const PlanData& plan, const Tensors& tensors, void* workspace,
           const Execution& execution) {
  if (!runs(best_arch(), plan.kernel.arch)) {
    return Status::device(std::string("the plan's kernel ") + plan.kernel_name + " needs " +
                          to_string(plan.kernel.arch) + "; this machine, with this build, runs " +
                          to_string(best_arch()) + " at most; plan for this_cpu()");
  }
  const Isa* isa = isa_of(plan.kernel.arch);
  const KernelFunction kernel = isa == nullptr ? nullptr : isa->find_kernel(plan.kernel);
  if (kernel == nullptr) {
    return Status::device(std::string("the plan's kernel ") + plan.kernel_name +
                          " is not part of this build");
  }
  const Result<Executor> executor = executor_of(execution);
  if (!executor) return executor.status();
  Workspace memory(workspace);
  const PlanLayout memory_layout = layout(memory, plan);
  Tensors read = tensors;
  if (lists_pages(plan)) {
    read.cache = keep_pages(plan.problem, tensors, memory_layout.kept_pages);
  }
  kernel({plan, read, memory_layout, *executor, execution.progress, execution.progress_context});
  return {};
}

Status combine(const PartialResults& results, const PartialTensors& tensors, const Device& device,
               const Execution& execution) {
  return call(&Isa::combine, "combine", results, tensors, device, execution);
}

Status append(const AppendShape& shape, const AppendTensors& tensors, const Device& device,
              const Execution& execution) {
  return call(&Isa::append, "append", shape, tensors, device, execution);
}

Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors, const Device& device,
                const Execution& execution) {
  return call(&Isa::quantize, "quantize", shape, tensors, device, execution);
}

}  // namespace tessera::cpu
