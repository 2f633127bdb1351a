// quantize: makes 8-bit tensors and their scales.
#include "plan/quantize.h"

#include <array>

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "places.h"

namespace tessera {
namespace {

/// What quantising uses, q first.
std::array<Given, 18> given_of(const QuantizeShape& s, const QuantizeTensors& t) {
  const bool q = has_q(s, t), k = has_k(s, t), v = has_v(s, t);
  const bool rows = q || k, any = rows || v;
  const auto given = [](const char* name, const void* data, bool used) {
    return Given{name, used ? data : nullptr};
  };
  return {
      given("q", t.q.data, q),
      given("k", t.k.data, k),
      given("v", t.v.data, v),
      given("q_out", t.q_out.data, q),
      given("k_out", t.k_out.data, k),
      given("v_out", t.v_out.data, v),
      given("q_scale", t.q_scale.data, q),
      given("k_scale", t.k_scale.data, k),
      given("v_scale", t.v_scale.data, v),
      given("k_mean", t.k_mean.data, rows),
      given("score_shift", t.score_shift.data, q),
      given("v_shift", t.v_shift.data, v),
      given("signs", t.signs, rows),
      given("cu_seqlens_q", t.cu_seqlens_q, any),
      given("cu_seqlens_k", t.cu_seqlens_k, any),
      given("rotary.cos", t.rotary.cos, rows),
      given("rotary.sin", t.rotary.sin, rows),
      given("rotary.seqlens", t.rotary.seqlens, rows),
  };
}

}  // namespace

Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors,
                const Execution& execution) {
  // Arrays cannot be read before it is known where they lie.
  if (Status s = validate(shape, tensors, Memory::device); !s) return s;
  const Result<Device> device = device_of(given_of(shape, tensors));
  if (!device) return device.status();
  return quantize(shape, tensors, *device, execution);
}

Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors, const Device& device,
                const Execution& execution) {
  if (Status s = validate(shape, tensors, Memory::device); !s) return s;
  if (Status s = check_places(execution, given_of(shape, tensors), device, "quantize"); !s) {
    return s;
  }
  if (is_gpu(device.arch)) return cuda::quantize(shape, tensors, device, execution);
  if (Status s = validate(shape, tensors, Memory::host); !s) return s;
  return cpu::quantize(shape, tensors, device, execution);
}

}  // namespace tessera
