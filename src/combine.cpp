// combine: merges partial results where they lie.
#include <array>

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "places.h"
#include "plan/plan.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

std::array<Given, 4> given_of(const PartialResults& results, const PartialTensors& t) {
  if (results.rows() == 0) return {};
  return {{{"o_parts", t.o_parts.data},
           {"lse_parts", t.lse_parts.data},
           {"o", t.o.data},
           {"softmax_lse", t.softmax_lse.data}}};
}

}  // namespace

Status combine(const PartialResults& results, const PartialTensors& tensors,
               const Execution& execution) {
  if (Status s = validate(results, tensors); !s) return s;
  const Result<Device> device = device_of(given_of(results, tensors));
  if (!device) return device.status();
  return combine(results, tensors, *device, execution);
}

Status combine(const PartialResults& results, const PartialTensors& tensors, const Device& device,
               const Execution& execution) {
  if (Status s = validate(results, tensors); !s) return s;
  if (Status s = check_places(execution, given_of(results, tensors), device, "combine"); !s)
    return s;
  return is_gpu(device.arch) ? cuda::combine(results, tensors, device, execution)
                             : cpu::combine(results, tensors, device, execution);
}

}  // namespace tessera
