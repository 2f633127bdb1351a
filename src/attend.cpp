// attend: on which device the tensors lie, a plan for it, a workspace.
#include <new>
#include <string>

#include "cuda/memory.h"
#include "plan/layout_gpu.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

/// A tensor of the run, if it has elements.
struct Given {
  const char* name;
  const void* data;
};

/// Calls visit(Given) for the tensors that the pass uses, q first, until one fails. Memory of no
/// bytes may be anywhere.
template <class Visit>
Status for_each_given(const Problem& p, const Tensors& t, const Visit& visit) {
  const bool rows_q = p.rows_q() > 0, rows_k = p.rows_k() > 0, backward = p.pass == Pass::backward;
  const struct {
    Given tensor;
    bool used;
  } all[] = {
      {{"q", t.q.data}, rows_q},
      {{"k", t.k.data}, rows_k},
      {{"v", t.v.data}, rows_k},
      {{"o", t.o.data}, rows_q},
      {{"softmax_lse", t.softmax_lse}, rows_q},
      {{"bias", t.bias.data}, rows_q && rows_k},
      {{"alibi_slopes", t.alibi_slopes}, rows_q && rows_k},
      {{"sink", t.sink}, rows_q},
      {{"cu_seqlens_q", t.cu_seqlens_q}, p.packed},
      {{"cu_seqlens_k", t.cu_seqlens_k}, p.packed},
      {{"dout", t.dout.data}, backward && rows_q},
      {{"dsoftmax_lse", t.dsoftmax_lse}, backward && rows_q},
      {{"dq", t.dq.data}, backward && rows_q},
      {{"dk", t.dk.data}, backward && rows_k},
      {{"dv", t.dv.data}, backward && rows_k},
      {{"dbias", t.dbias.data}, backward && bias_elements(p) > 0},  // zeros where no score is
      {{"dsink", t.dsink}, backward},
  };
  for (const auto& one : all) {
    if (!one.used || one.tensor.data == nullptr) continue;
    if (Status s = visit(one.tensor); !s) return s;
  }
  return {};
}

std::string text_of(const cuda::Place& place) {
  const std::string gpu = "gpu:" + std::to_string(place.ordinal);
  switch (place.kind) {
    case cuda::Place::Kind::host: return "host memory";
    case cuda::Place::Kind::pinned: return "pinned host memory";
    case cuda::Place::Kind::managed: return "managed memory of " + gpu;
    case cuda::Place::Kind::device: return "memory of " + gpu;
  }
  return "?";
}

/// The GPU on which the first tensor lies, or this CPU.
Result<Device> device_of(const Problem& problem, const Tensors& tensors) {
  using Kind = cuda::Place::Kind;
  bool found = false;
  cuda::Place first;
  const Status status = for_each_given(problem, tensors, [&](const Given& tensor) -> Status {
    if (found) return {};
    const Result<cuda::Place> place = cuda::place_of(tensor.data);
    if (!place) return place.status();
    found = true;
    first = *place;
    return {};
  });
  if (!status) return status;
  const bool on_gpu = first.kind == Kind::device || first.kind == Kind::managed;
  return on_gpu ? this_gpu(first.ordinal) : this_cpu();
}

/// Every tensor must lie where the device may read and write it.
Status check_places(const Problem& problem, const Tensors& tensors, const Device& device) {
  using Kind = cuda::Place::Kind;
  const bool on_gpu = is_gpu(device.arch);
  return for_each_given(problem, tensors, [&](const Given& tensor) -> Status {
    const Result<cuda::Place> place = cuda::place_of(tensor.data);
    if (!place) return place.status();
    const bool on_host = place->kind == Kind::host || place->kind == Kind::pinned;
    if (place->kind == Kind::managed) return {};
    if (on_gpu ? !on_host && place->ordinal == device.ordinal : on_host) return {};
    const std::string here = on_gpu ? "gpu:" + std::to_string(device.ordinal) : "this CPU";
    return Status::invalid(std::string(tensor.name) + ": lies in " + text_of(*place) +
                           "; attention on " + here + " takes " +
                           (on_gpu ? "its own" : "the host's") + " and managed memory");
  });
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
  const Result<Device> device = device_of(problem, tensors);
  if (!device) return device.status();
  return attend(problem, tensors, *device, execution);
}

Status attend(const Problem& problem, const Tensors& tensors, const Device& device,
              const Execution& execution) {
  Problem placed = problem;
  if (is_gpu(device.arch) && needs_unaligned(problem, tensors)) placed.unaligned = true;
  const Result<Plan> planned = plan(placed, device);
  if (!planned) return planned.status();
  if (Status s = check_places(problem, tensors, device); !s) return s;
  return is_gpu(device.arch) ? attend_on_gpu(*planned, tensors, execution)
                             : attend_on_cpu(*planned, tensors, execution);
}

}  // namespace tessera
