// What a plan for one GPU architecture becomes on a device: which devices run its code, and how a
// pass is launched.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/architecture.h"
#include "cuda/launch.h"

namespace tessera::cuda {

struct Target {
  const Architecture* architecture;
  const char* devices;  ///< in words, for errors
  bool (*runs_on)(int compute_major, int compute_minor);
  Status (*run_forward)(const PlanData& plan, const Tensors& tensors, const Queue& queue);
  Status (*run_backward)(const PlanData& plan, const Tensors& tensors, void* workspace,
                         const Queue& queue);
  /// Number of the first auxiliary kernel that merges partial results (aux/combine.h): one for
  /// parts of every type, in the order of Dtype.
  std::size_t combine;
};

std::span<const Target> targets();

/// Null: this library has none.
const Target* target_of(Arch arch);

}  // namespace tessera::cuda
