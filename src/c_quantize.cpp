// Quantising of the C ABI.
#include <cstddef>

#include "c_structures.h"

namespace {

using namespace tessera::c;  // NOLINT(google-build-using-namespace): what they share
using tessera::Result;
using tessera::Status;
using tessera::c::to_cpp;  // beside those below

// As of tessera_problem in c_api.cpp.
static_assert(sizeof(tessera_quantize_shape) ==
              offsetof(tessera_quantize_shape, rotary_constant_q) +
                  sizeof(tessera_quantize_shape::rotary_constant_q));

Result<tessera::QuantizeShape> to_cpp(const tessera_quantize_shape* from) {
  tessera_quantize_shape c;
  tessera_quantize_shape_init(&c, sizeof c);
  if (Status s = read_struct("shape", from, c); !s) return s;
  const Result<tessera::Problem> problem = problem_of(c.problem);
  if (!problem) return problem.status();
  tessera::QuantizeShape shape;
  tessera::RotaryShape rotary;
  const Status checks[] = {
      read_enum("dtype", c.dtype, tessera::Dtype::f16, shape.dtype),
      read_enum("signs", c.signs, true, shape.signs),
      read_enum("rotary_dtype", c.rotary_dtype, tessera::Dtype::f16, rotary.dtype),
      read_enum("rotary_interleaved", c.rotary_interleaved, true, rotary.interleaved),
      read_enum("rotary_constant_q", c.rotary_constant_q, true, rotary.constant_q),
  };
  for (const Status& s : checks) {
    if (!s) return s;
  }
  shape.problem = *problem;
  shape.hadamard = c.hadamard;
  rotary.dim = c.rotary_dim;
  rotary.positions = c.rotary_positions;
  if (c.rotary_dim != 0) shape.rotary = rotary;
  return shape;
}

Result<tessera::QuantizeTensors> to_cpp(const tessera_quantize_tensors* from) {
  tessera_quantize_tensors c{};
  if (Status s = read_struct("tensors", from, c); !s) return s;
  tessera::QuantizeTensors t;
  t.q = to_cpp(c.q);
  t.k = to_cpp(c.k);
  t.v = to_cpp(c.v);
  t.q_out = to_cpp(c.q_out);
  t.k_out = to_cpp(c.k_out);
  t.v_out = to_cpp(c.v_out);
  t.q_scale = to_cpp(c.q_scale);
  t.k_scale = to_cpp(c.k_scale);
  t.v_scale = to_cpp(c.v_scale);
  t.k_mean = to_cpp(c.k_mean);
  t.score_shift = to_cpp(c.score_shift);
  t.v_shift = to_cpp(c.v_shift);
  t.signs = c.signs;
  t.cu_seqlens_q = c.cu_seqlens_q;
  t.cu_seqlens_k = c.cu_seqlens_k;
  t.rotary = {c.rotary_cos,        c.rotary_sin,     c.stride_rotary_cos,
              c.stride_rotary_sin, c.rotary_seqlens, nullptr};
  return t;
}

}  // namespace

extern "C" {

void tessera_quantize_shape_init(tessera_quantize_shape* shape, size_t size) {
  const tessera::QuantizeShape defaults;
  tessera_quantize_shape c{};
  c.dtype = static_cast<std::int32_t>(defaults.dtype);
  initialise(shape, size, c);
}

void tessera_quantize_tensors_init(tessera_quantize_tensors* tensors, size_t size) {
  initialise(tensors, size);
}

tessera_code tessera_quantize(const tessera_quantize_shape* shape,
                              const tessera_quantize_tensors* tensors, const char* device,
                              const tessera_execution* execution, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    const auto s = to_cpp(shape);
    if (!s) return s.status();
    const auto t = to_cpp(tensors);
    if (!t) return t.status();
    Executed executed;
    if (Status status = executed.read(execution); !status) return status;
    if (device == nullptr) return tessera::quantize(*s, *t, *executed);
    const auto where = to_device(device);
    if (!where) return where.status();
    return tessera::quantize(*s, *t, *where, *executed);
  });
}

}  // extern "C"
