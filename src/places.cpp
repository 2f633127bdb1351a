#include "places.h"

#include <string>

#include "cuda/memory.h"

namespace tessera {
namespace {

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

}  // namespace

Result<Device> device_of(std::span<const Given> tensors) {
  using Kind = cuda::Place::Kind;
  for (const Given& tensor : tensors) {
    if (tensor.data == nullptr) continue;
    const Result<cuda::Place> place = cuda::place_of(tensor.data);
    if (!place) return place.status();
    const bool on_gpu = place->kind == Kind::device || place->kind == Kind::managed;
    return on_gpu ? this_gpu(place->ordinal) : this_cpu();
  }
  return this_cpu();
}

Status check_places(const Execution& execution, std::span<const Given> tensors,
                    const Device& device, const char* what) {
  using Kind = cuda::Place::Kind;
  if (execution.places_known) return {};
  const bool on_gpu = is_gpu(device.arch);
  for (const Given& tensor : tensors) {
    if (tensor.data == nullptr) continue;
    const Result<cuda::Place> place = cuda::place_of(tensor.data);
    if (!place) return place.status();
    const bool on_host = place->kind == Kind::host || place->kind == Kind::pinned;
    if (place->kind == Kind::managed) continue;
    if (on_gpu ? !on_host && place->ordinal == device.ordinal : on_host) continue;
    const std::string here = on_gpu ? "gpu:" + std::to_string(device.ordinal) : "this CPU";
    return Status::invalid(std::string(tensor.name) + ": lies in " + text_of(*place) + "; " + what +
                           " on " + here + " takes " + (on_gpu ? "its own" : "the host's") +
                           " and managed memory");
  }
  return {};
}

}  // namespace tessera
