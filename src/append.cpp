// append: writes new keys and values where the cache lies.
#include "plan/append.h"

#include <array>

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "places.h"

namespace tessera {
namespace {

/// What an append uses, the cache first.
std::array<Given, 17> given_of(const AppendShape& s, const AppendTensors& t) {
  const bool any_new = s.rows_new() > 0, any_q = s.rows_q() > 0;
  const auto given = [](const char* name, const void* data, bool used) {
    return Given{name, used ? data : nullptr};
  };
  const bool any = any_new || any_q;
  return {
      given("k", t.k.data, any_new),
      given("v", t.v.data, any_new),
      given("q", t.q.data, any_q),
      given("q_out", t.q_out.data, any_q),
      given("k_new", t.k_new.data, any_new),
      given("v_new", t.v_new.data, any_new),
      given("k_scale", t.k_scale.data, any_new),
      given("v_scale", t.v_scale.data, any_new),
      given("cache.seqlens", t.cache.seqlens, any),
      given("cache.cu_seqlens_new", t.cache.cu_seqlens_new, any),
      given("cache.page_table", t.cache.page_table, any_new),
      given("cache.index", t.cache.index, any_new),
      given("cu_seqlens_q", t.cu_seqlens_q, any),
      given("slot_mapping", t.slot_mapping, any_new),
      given("rotary.cos", t.rotary.cos, any),
      given("rotary.sin", t.rotary.sin, any),
      // One or the other.
      t.rotary.seqlens != nullptr ? given("rotary.seqlens", t.rotary.seqlens, any)
                                  : given("rotary.positions", t.rotary.positions, any),
  };
}

}  // namespace

Status append(const AppendShape& shape, const AppendTensors& tensors, const Execution& execution) {
  // Arrays cannot be read before it is known where they lie.
  if (Status s = validate(shape, tensors, Memory::device); !s) return s;
  const Result<Device> device = device_of(given_of(shape, tensors));
  if (!device) return device.status();
  return append(shape, tensors, *device, execution);
}

Status append(const AppendShape& shape, const AppendTensors& tensors, const Device& device,
              const Execution& execution) {
  if (Status s = validate(shape, tensors, Memory::device); !s) return s;
  if (Status s = check_places(execution, given_of(shape, tensors), device, "append"); !s) return s;
  if (is_gpu(device.arch)) return cuda::append(shape, tensors, device, execution);
  if (Status s = validate(shape, tensors, Memory::host); !s) return s;
  return cpu::append(shape, tensors, device, execution);
}

}  // namespace tessera
