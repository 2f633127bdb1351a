// How the launches of a pass reach the driver: kernels of the catalog's rows, loaded by their first
// use.
#pragma once

#include <cstdint>

#include "core/kernel.h"
#include "cuda/driver.h"
#include "plan/plan.h"

namespace tessera::cuda {

/// Kernels that are not rows of the catalog: what the backward pass does before and after its main
/// kernel.
enum class RowsKernel : std::uint8_t {
  prepare_bf16,
  prepare_f16,
  finish_bf16,
  finish_f16,
  sum_sinks,
  begin_bias,
  finish_bias,
};
inline constexpr std::size_t kRowsKernels = 7;

/// A device of which the context is current, and a stream of it.
struct Queue {
  CuDevice device = 0;
  CuStream stream = nullptr;

  /// Enqueues a row's kernel, or one of the others; params: the kernel's only parameter, copied.
  /// Errors: device.
  Status launch(const core::Kernel& row, std::int64_t blocks, const void* params) const;
  Status launch(RowsKernel kernel, std::int64_t blocks, const void* params) const;
};

Status run_forward(const PlanData& plan, const Tensors& tensors, const Queue& queue);
Status run_backward(const PlanData& plan, const Tensors& tensors, void* workspace,
                    const Queue& queue);

}  // namespace tessera::cuda
