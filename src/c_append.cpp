// The append of the C ABI.
#include <cstddef>

#include "c_structures.h"

namespace {

using namespace tessera::c;  // NOLINT(google-build-using-namespace): what they share
using tessera::Result;
using tessera::Status;
using tessera::c::to_cpp;  // beside those below

static_assert(static_cast<int>(tessera::PositionType::i64) == TESSERA_POSITION_I64);
// As of tessera_problem in c_api.cpp.
static_assert(sizeof(tessera_append_shape) ==
              offsetof(tessera_append_shape, reserved) + sizeof(tessera_append_shape::reserved));

Result<tessera::AppendShape> to_cpp(const tessera_append_shape* from) {
  tessera_append_shape c;
  tessera_append_shape_init(&c, sizeof c);
  if (Status s = read_struct("shape", from, c); !s) return s;
  tessera::AppendShape shape;
  tessera::RotaryShape rotary;
  tessera::Dtype dtype_kv{};
  int lengths = 0, reserved = 0;
  const Status checks[] = {
      read_enum("dtype", c.dtype, tessera::Dtype::f16, shape.dtype),
      read_enum("cache", c.cache, static_cast<int>(TESSERA_CACHE_BEFORE), lengths),
      read_enum("page_ids", c.page_ids, tessera::PageIds::i64, shape.cache.page_ids),
      read_enum("packed", c.packed, true, shape.packed),
      read_enum("packed_new", c.packed_new, true, shape.packed_new),
      read_enum("slot_mapping", c.slot_mapping, true, shape.slot_mapping),
      read_enum("rotary_dtype", c.rotary_dtype, tessera::Dtype::f16, rotary.dtype),
      read_enum("rotary_interleaved", c.rotary_interleaved, true, rotary.interleaved),
      read_enum("rotary_constant_q", c.rotary_constant_q, true, rotary.constant_q),
      read_enum("rotary_position_type", c.rotary_position_type, tessera::PositionType::i64,
                rotary.position_type),
      read_enum("dtype_kv", c.dtype_kv, tessera::Dtype::i8, dtype_kv),
      read_enum("scale_k", c.scale_k, tessera::Scaling::channel, shape.scale_k),
      read_enum("scale_v", c.scale_v, tessera::Scaling::channel, shape.scale_v),
      read_enum("reserved", c.reserved, 0, reserved),
  };
  for (const Status& s : checks) {
    if (!s) return s;
  }
  if (lengths == TESSERA_NO_CACHE) {
    return Status::invalid(
        "cache = 0: must be a tessera_cache_lengths that says what lengths count");
  }
  shape.cache.lengths = static_cast<tessera::Lengths>(lengths - TESSERA_CACHE_FULL);
  shape.batch = c.batch;
  shape.num_heads = c.num_heads;
  shape.num_heads_k = c.num_heads_k;
  shape.seqlen_q = c.seqlen_q;
  shape.seqlen_k = c.seqlen_k;
  shape.head_dim = c.head_dim;
  shape.head_dim_v = c.head_dim_v;
  shape.cache.seqlen_new = c.seqlen_new;
  shape.cache.page_size = c.page_size;
  shape.cache.num_pages = c.num_pages;
  shape.cache.rows = c.cache_rows;
  shape.total_q = c.total_q;
  shape.total_new = c.total_new;
  rotary.dim = c.rotary_dim;
  rotary.positions = c.rotary_positions;
  if (c.rotary_dim != 0) shape.rotary = rotary;
  if (c.dtype_kv != 0) shape.dtype_kv = dtype_kv;
  return shape;
}

Result<tessera::AppendTensors> to_cpp(const tessera_append_tensors* from) {
  tessera_append_tensors c{};
  if (Status s = read_struct("tensors", from, c); !s) return s;
  tessera::AppendTensors t;
  t.k_new = to_cpp(c.k_new);
  t.v_new = to_cpp(c.v_new);
  t.k = to_cpp(c.k);
  t.v = to_cpp(c.v);
  t.q = to_cpp(c.q);
  t.q_out = to_cpp(c.q_out);
  t.cache = to_cpp(c.cache);
  t.k_scale = to_cpp(c.k_scale);
  t.v_scale = to_cpp(c.v_scale);
  t.cu_seqlens_q = c.cu_seqlens_q;
  t.slot_mapping = c.slot_mapping;
  t.rotary = {c.rotary_cos,        c.rotary_sin,     c.stride_rotary_cos,
              c.stride_rotary_sin, c.rotary_seqlens, c.rotary_positions};
  return t;
}

}  // namespace

extern "C" {

void tessera_append_shape_init(tessera_append_shape* shape, size_t size) {
  const tessera::AppendShape defaults;
  tessera_append_shape c{};
  c.dtype = static_cast<std::int32_t>(defaults.dtype);
  c.cache = TESSERA_CACHE_FULL + static_cast<std::int32_t>(defaults.cache.lengths);
  c.batch = defaults.batch;
  c.num_heads = defaults.num_heads;
  c.num_heads_k = defaults.num_heads_k;
  initialise(shape, size, c);
}

void tessera_append_tensors_init(tessera_append_tensors* tensors, size_t size) {
  initialise(tensors, size);
}

tessera_code tessera_append(const tessera_append_shape* shape,
                            const tessera_append_tensors* tensors, const char* device,
                            const tessera_execution* execution, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    const auto s = to_cpp(shape);
    if (!s) return s.status();
    const auto t = to_cpp(tensors);
    if (!t) return t.status();
    Executed executed;
    if (Status status = executed.read(execution); !status) return status;
    if (device == nullptr) return tessera::append(*s, *t, *executed);
    const auto where = to_device(device);
    if (!where) return where.status();
    return tessera::append(*s, *t, *where, *executed);
  });
}

}  // extern "C"
