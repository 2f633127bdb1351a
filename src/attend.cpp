// attend: on which device the tensors lie, a plan for it, a workspace.
#include <array>
#include <new>
#include <string>

#include "cuda/memory.h"
#include "places.h"
#include "plan/layout_gpu.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

/// The tensors that the pass uses, q first.
std::array<Given, 29> given_of(const Problem& p, const Tensors& t) {
  const bool rows_q = p.rows_q() > 0, rows_k = p.rows_k() > 0, backward = p.pass == Pass::backward;
  const auto given = [](const char* name, const void* data, bool used) {
    return Given{name, used ? data : nullptr};
  };
  return {
      given("q", t.q.data, rows_q),
      given("k", t.k.data, rows_k),
      given("v", t.v.data, rows_k),
      given("qv", t.qv.data, p.qv && rows_q),
      given("o", t.o.data, rows_q),
      given("softmax_lse", t.softmax_lse, rows_q),
      given("bias", t.bias.data, rows_q && rows_k),
      given("alibi_slopes", t.alibi_slopes, rows_q && rows_k),
      given("sink", t.sink, rows_q),
      given("cu_seqlens_q", t.cu_seqlens_q, p.packed),
      given("cu_seqlens_k", t.cu_seqlens_k, p.packed_k()),
      given("cache.seqlens", t.cache.seqlens, p.cache.has_value()),
      given("cache.cu_seqlens_new", t.cache.cu_seqlens_new, p.cache.has_value()),
      given("cache.page_table", t.cache.page_table, p.cache.has_value()),
      given("cache.index", t.cache.index, p.cache.has_value()),
      given("cache.leftpad", t.cache.leftpad, p.cache.has_value()),
      given("tree_mask", t.tree_mask, p.tree && rows_q),
      given("q_scale", t.q_scale.data, rows_q && rows_k),
      given("k_scale", t.k_scale.data, rows_q && rows_k),
      given("v_scale", t.v_scale.data, rows_q && rows_k),
      given("score_shift", t.score_shift.data, rows_q && rows_k),
      given("v_shift", t.v_shift.data, rows_q && rows_k),
      given("dout", t.dout.data, backward && rows_q),
      given("dsoftmax_lse", t.dsoftmax_lse, backward && rows_q),
      given("dq", t.dq.data, backward && rows_q),
      given("dk", t.dk.data, backward && rows_k),
      given("dv", t.dv.data, backward && rows_k),
      // Zeros where no score is.
      given("dbias", t.dbias.data, backward && bias_elements(p) > 0),
      given("dsink", t.dsink, backward),
  };
}

Status attend_on_gpu(const Plan& plan, const Tensors& tensors, const Execution& execution) {
  const std::size_t bytes = plan.workspace_bytes();
  if (bytes == 0) return run(plan, tensors, nullptr, 0, execution);
  const int ordinal = plan.device().ordinal;
  const Result<void*> workspace = cuda::allocate_async(ordinal, bytes, execution.stream);
  if (!workspace) return workspace.status();
  Status status = run(plan, tensors, *workspace, bytes, execution);
  Status freed = cuda::deallocate_async(ordinal, *workspace, execution.stream);
  if (!status) return status;
  return freed;
}

Status attend_on_cpu(const Plan& plan, const Tensors& tensors, const Execution& execution) {
  const std::size_t bytes = plan.workspace_bytes();
  constexpr auto kAlignment = std::align_val_t{Plan::workspace_alignment};
  void* workspace = ::operator new(bytes, kAlignment, std::nothrow);
  if (workspace == nullptr) {
    return Status::workspace("workspace: could not allocate " + std::to_string(bytes) + " bytes");
  }
  Status status = run(plan, tensors, workspace, bytes, execution);
  ::operator delete(workspace, kAlignment);
  return status;
}

}  // namespace

Status attend(const Problem& problem, const Tensors& tensors, const Execution& execution) {
  if (Status s = validate(problem); !s) return s;
  const Result<Device> device = device_of(given_of(problem, tensors));
  if (!device) return device.status();
  return attend(problem, tensors, *device, execution);
}

Status attend(const Problem& problem, const Tensors& tensors, const Device& device,
              const Execution& execution) {
  Problem placed = problem;
  if (is_gpu(device.arch) && needs_unaligned(problem, tensors)) placed.unaligned = true;
  const Result<Plan> planned = plan(placed, device);
  if (!planned) return planned.status();
  if (Status s = check_places(execution, given_of(problem, tensors), device, "attention"); !s)
    return s;
  return is_gpu(device.arch) ? attend_on_gpu(*planned, tensors, execution)
                             : attend_on_cpu(*planned, tensors, execution);
}

}  // namespace tessera
