// What a plan for one GPU architecture becomes on a device: which devices run its code, and how a
// pass is launched.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "cuda/architecture.h"
#include "cuda/context.h"
#include "cuda/launch.h"

namespace tessera::cuda {

struct Target {
  const Architecture* architecture;
  const char* devices;              ///< in words, for errors
  bool (*runs_on)(int capability);  ///< 90 for 9.0
  Status (*run_forward)(const PlanData& plan, const Tensors& tensors, void* workspace,
                        const Queue& queue);
  Status (*run_backward)(const PlanData& plan, const Tensors& tensors, void* workspace,
                         const Queue& queue);
};

std::span<const Target> targets();

/// Null: this library has none.
const Target* target_of(Arch arch);

/// Whose kernels are for devices of that compute capability alone, or the first that run there.
/// Null: none.
const Target* own_target(int capability);

/// The same; but it is passed over if there is no code of it, and of another one there is.
const Target* target_on(int capability, bool (*has_code)(const Architecture&, int capability));

/// Calls enqueue(queue) for execution.stream of the device, whose context is current
/// meanwhile. what: in errors, "combine". Errors: device, and its own.
template <class Enqueue>
Status enqueue_on(const Device& device, const Execution& execution, const char* what,
                  const Enqueue& enqueue) {
  if (!driver().available()) return Status::device(driver().missing);
  const Target* const target = target_of(device.arch);
  if (target == nullptr) {
    return Status::device(std::string(what) + ": nothing here launches it for " +
                          to_string(device.arch));
  }
  const CurrentContext context(device.ordinal);
  if (!context.status()) return context.status();
  return enqueue(
      Queue{target->architecture, context.device(), static_cast<CuStream>(execution.stream)});
}

}  // namespace tessera::cuda
