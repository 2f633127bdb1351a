// The C ABI: converts to the C++ types and back; no logic of its own.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "c_structures.h"

struct tessera_plan {
  tessera::Plan plan;
  std::string kernel;
};

namespace {

using namespace tessera::c;  // NOLINT(google-build-using-namespace): what they share
using tessera::Code;
using tessera::PageIds;
using tessera::Result;
using tessera::Status;
using tessera::c::to_cpp;  // beside those below

static_assert(static_cast<int>(Code::device) == TESSERA_DEVICE);
static_assert(static_cast<int>(tessera::Dtype::i8) == TESSERA_I8);
static_assert(static_cast<int>(tessera::Scaling::group) == TESSERA_SCALE_GROUP);
static_assert(static_cast<int>(tessera::PerHead::batch_heads) == TESSERA_PER_HEAD_BATCH_HEADS);
static_assert(static_cast<int>(tessera::Lengths::before) ==
              TESSERA_CACHE_BEFORE - TESSERA_CACHE_FULL);
static_assert(static_cast<int>(tessera::PageIds::i64) == TESSERA_PAGE_I64);
static_assert(static_cast<int>(tessera::Alignment::top_left) == TESSERA_TOP_LEFT);
// read_struct() tells an older caller by the size, which a field added in padding would not change.
static_assert(sizeof(tessera_problem) ==
              offsetof(tessera_problem, prefix_levels) + sizeof(tessera_problem::prefix_levels));

/// What 8 bits need.
Status read_scales(const tessera_problem& c, tessera::Problem& p) {
  const auto last = tessera::Scaling::group;
  if (Status s = read_enum("scale_q", c.scale_q, last, p.scales.q); !s) return s;
  if (Status s = read_enum("scale_k", c.scale_k, last, p.scales.k); !s) return s;
  if (Status s = read_enum("scale_v", c.scale_v, last, p.scales.v); !s) return s;
  if (Status s = read_enum("score_shift", c.score_shift, true, p.scales.score_shift); !s) return s;
  if (Status s = read_enum("v_shift", c.v_shift, true, p.scales.v_shift); !s) return s;
  if (Status s = read_enum("v_tiles", c.v_tiles, true, p.v_tiles); !s) return s;
  p.scales.block_k = c.scale_block_k;
  p.scales.block_v = c.scale_block_v;
  if (c.dtype_kv != 0) {
    p.dtype_kv = tessera::Dtype::f32;
    if (Status s = read_enum("dtype_kv", c.dtype_kv, tessera::Dtype::i8, *p.dtype_kv); !s) return s;
  }
  if (c.dtype_v == -1) return {};
  p.dtype_v = tessera::Dtype::f32;
  return read_enum("dtype_v", c.dtype_v, tessera::Dtype::i8, *p.dtype_v);
}

/// Where keys and values lie, if in a cache.
Status read_cache(const tessera_problem& c, tessera::Problem& p) {
  bool leftpad = false, skips = false;
  PageIds page_ids = PageIds::i32;
  int lengths = 0;
  const Status checks[] = {
      read_enum("cache", c.cache, static_cast<int>(TESSERA_CACHE_BEFORE), lengths),
      read_enum("page_ids", c.page_ids, PageIds::i64, page_ids),
      read_enum("leftpad", c.leftpad, true, leftpad),
      read_enum("skip_pages", c.skip_pages, true, skips),
  };
  for (const Status& s : checks) {
    if (!s) return s;
  }
  const tessera::CacheShape cache = {static_cast<tessera::Lengths>(lengths - TESSERA_CACHE_FULL),
                                     c.seqlen_new,
                                     c.page_size,
                                     c.num_pages,
                                     page_ids,
                                     c.cache_rows,
                                     leftpad,
                                     skips,
                                     c.prefix_levels};
  if (lengths != TESSERA_NO_CACHE) {
    p.cache = cache;
  } else if (cache != tessera::CacheShape{.lengths = cache.lengths}) {
    return Status::invalid(
        "cache = 0: seqlen_new, page_size, num_pages, page_ids, cache_rows, leftpad, skip_pages "
        "and prefix_levels say something of a cache; set it to a tessera_cache_lengths");
  }
  return {};
}

Result<tessera::Problem> to_cpp(const tessera_problem* from) {
  tessera_problem c;
  tessera_problem_init(&c, sizeof c);
  if (Status s = read_struct("problem", from, c); !s) return s;
  tessera::Problem p;
  tessera::BiasShape bias;
  bool has_bias = false;
  const Status checks[] = {
      read_cache(c, p),
      read_enum("tree", c.tree, true, p.tree),
      read_enum("qv", c.qv, true, p.qv),
      read_enum("pass", c.pass, tessera::Pass::backward, p.pass),
      read_enum("dtype", c.dtype, tessera::Dtype::i8, p.dtype),
      read_scales(c, p),
      read_enum("alignment", c.alignment, tessera::Alignment::top_left, p.alignment),
      read_enum("alibi", c.alibi, tessera::PerHead::batch_heads, p.alibi),
      read_enum("bias_dtype", c.bias_dtype, tessera::Dtype::f16, bias.dtype),
      read_enum("packed", c.packed, true, p.packed),
      read_enum("has_bias", c.has_bias, true, has_bias),
      read_enum("sink", c.sink, true, p.sink),
      read_enum("deterministic", c.deterministic, true, p.deterministic),
      read_enum("batch_invariant", c.batch_invariant, true, p.batch_invariant),
      read_enum("unaligned", c.unaligned, true, p.unaligned),
  };
  if (c.dtype_o != -1) {
    p.dtype_o = tessera::Dtype::f32;
    if (Status s = read_enum("dtype_o", c.dtype_o, tessera::Dtype::f16, *p.dtype_o); !s) return s;
  }
  for (const Status& s : checks) {
    if (!s) return s;
  }
  if (c.bias_dims > 15U) {
    return Status::invalid("bias_dims = " + std::to_string(c.bias_dims) +
                           ": must be a sum of TESSERA_BIAS_* values");
  }
  p.batch = c.batch;
  p.num_heads = c.num_heads;
  p.num_heads_k = c.num_heads_k;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_k = c.seqlen_k;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.total_q = c.total_q;
  p.total_k = c.total_k;
  if (!std::isnan(c.softmax_scale)) p.softmax_scale = c.softmax_scale;
  p.softcap = c.softcap;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.dropout_p = c.dropout_p;
  p.chunk = c.chunk;
  p.sink_tokens = c.sink_tokens;
  if (has_bias) {
    bias.batch = (c.bias_dims & TESSERA_BIAS_BATCH) != 0;
    bias.heads = (c.bias_dims & TESSERA_BIAS_HEADS) != 0;
    bias.queries = (c.bias_dims & TESSERA_BIAS_QUERIES) != 0;
    bias.keys = (c.bias_dims & TESSERA_BIAS_KEYS) != 0;
    p.bias = bias;
  }
  return p;
}

void to_c(const tessera::Problem& p, tessera_problem& c) {
  c.pass = static_cast<std::int32_t>(p.pass);
  c.dtype = static_cast<std::int32_t>(p.dtype);
  c.batch = p.batch;
  c.num_heads = p.num_heads;
  c.num_heads_k = p.num_heads_k;
  c.seqlen_q = p.seqlen_q;
  c.seqlen_k = p.seqlen_k;
  c.head_dim = p.head_dim;
  c.head_dim_v = p.head_dim_v;
  c.packed = p.packed ? 1 : 0;
  c.alignment = static_cast<std::int32_t>(p.alignment);
  c.total_q = p.total_q;
  c.total_k = p.total_k;
  c.softmax_scale = p.softmax_scale.value_or(std::numeric_limits<float>::quiet_NaN());
  c.softcap = p.softcap;
  c.window_left = p.window_left;
  c.window_right = p.window_right;
  c.alibi = static_cast<std::int32_t>(p.alibi);
  c.has_bias = p.bias ? 1 : 0;
  if (p.bias) {
    const auto bit = [](bool stored, std::uint32_t value) { return stored ? value : 0U; };
    c.bias_dims = bit(p.bias->batch, TESSERA_BIAS_BATCH) | bit(p.bias->heads, TESSERA_BIAS_HEADS) |
                  bit(p.bias->queries, TESSERA_BIAS_QUERIES) | bit(p.bias->keys, TESSERA_BIAS_KEYS);
    c.bias_dtype = static_cast<std::int32_t>(p.bias->dtype);
  }
  c.sink = p.sink ? 1 : 0;
  c.dropout_p = p.dropout_p;
  c.deterministic = p.deterministic ? 1 : 0;
  c.batch_invariant = p.batch_invariant ? 1 : 0;
  c.unaligned = p.unaligned ? 1 : 0;
  c.dtype_o = p.dtype_o ? static_cast<std::int32_t>(*p.dtype_o) : -1;
  const tessera::CacheShape cache = p.cache.value_or(tessera::CacheShape());
  c.cache = p.cache ? TESSERA_CACHE_FULL + static_cast<std::int32_t>(cache.lengths)
                    : static_cast<std::int32_t>(TESSERA_NO_CACHE);
  c.page_ids = static_cast<std::int32_t>(cache.page_ids);
  c.seqlen_new = cache.seqlen_new;
  c.page_size = cache.page_size;
  c.num_pages = cache.num_pages;
  c.cache_rows = cache.rows;
  c.chunk = p.chunk;
  c.sink_tokens = p.sink_tokens;
  c.leftpad = cache.leftpad ? 1 : 0;
  c.skip_pages = cache.skips ? 1 : 0;
  c.prefix_levels = cache.prefix_levels;
  c.tree = p.tree ? 1 : 0;
  c.qv = p.qv ? 1 : 0;
  c.dtype_v = p.dtype_v ? static_cast<std::int32_t>(*p.dtype_v) : -1;
  c.dtype_kv = p.dtype_kv ? static_cast<std::int32_t>(*p.dtype_kv) : 0;
  c.scale_q = static_cast<std::int32_t>(p.scales.q);
  c.scale_k = static_cast<std::int32_t>(p.scales.k);
  c.scale_v = static_cast<std::int32_t>(p.scales.v);
  c.scale_block_k = p.scales.block_k;
  c.scale_block_v = p.scales.block_v;
  c.score_shift = p.scales.score_shift ? 1 : 0;
  c.v_shift = p.scales.v_shift ? 1 : 0;
  c.v_tiles = p.v_tiles ? 1 : 0;
}

tessera::ConstBias to_cpp(const tessera_const_bias& b) {
  return {b.data, b.stride_batch, b.stride_head, b.stride_query, b.stride_key};
}

tessera::Bias to_cpp(const tessera_bias& b) {
  return {b.data, b.stride_batch, b.stride_head, b.stride_query, b.stride_key};
}

Result<tessera::Tensors> to_cpp(const tessera_tensors* from) {
  tessera_tensors c;
  tessera_tensors_init(&c, sizeof c);
  if (Status s = read_struct("tensors", from, c); !s) return s;
  tessera::Tensors t;
  t.q = to_cpp(c.q);
  t.k = to_cpp(c.k);
  t.v = to_cpp(c.v);
  t.o = to_cpp(c.o);
  t.softmax_lse = c.softmax_lse;
  t.bias = to_cpp(c.bias);
  t.alibi_slopes = c.alibi_slopes;
  t.sink = c.sink;
  t.cu_seqlens_q = c.cu_seqlens_q;
  t.cu_seqlens_k = c.cu_seqlens_k;
  t.cache = to_cpp(c.cache);
  t.tree_mask = c.tree_mask;
  t.qv = to_cpp(c.qv);
  t.q_scale = to_cpp(c.q_scale);
  t.k_scale = to_cpp(c.k_scale);
  t.v_scale = to_cpp(c.v_scale);
  t.score_shift = to_cpp(c.score_shift);
  t.v_shift = to_cpp(c.v_shift);
  t.philox_seed = c.philox_seed;
  t.philox_offset = c.philox_offset;
  t.dout = to_cpp(c.dout);
  t.dsoftmax_lse = c.dsoftmax_lse;
  t.dq = to_cpp(c.dq);
  t.dk = to_cpp(c.dk);
  t.dv = to_cpp(c.dv);
  t.dbias = to_cpp(c.dbias);
  t.dsink = c.dsink;
  return t;
}

Result<tessera::PartialResults> to_cpp(const tessera_partial_results* from) {
  tessera_partial_results c;
  tessera_partial_results_init(&c, sizeof c);
  if (Status s = read_struct("results", from, c); !s) return s;
  tessera::PartialResults r;
  if (Status s = read_enum("dtype", c.dtype, tessera::Dtype::f16, r.dtype); !s) return s;
  if (Status s = read_enum("dtype_o", c.dtype_o, tessera::Dtype::f16, r.dtype_o); !s) return s;
  r.num_splits = c.num_splits;
  r.batch = c.batch;
  r.seqlen_q = c.seqlen_q;
  r.num_heads = c.num_heads;
  r.head_dim_v = c.head_dim_v;
  return r;
}

Result<tessera::PartialTensors> to_cpp(const tessera_partial_tensors* from) {
  tessera_partial_tensors c{};
  if (Status s = read_struct("tensors", from, c); !s) return s;
  tessera::PartialTensors t;
  const auto& o = c.o_parts;
  t.o_parts = {o.data, o.stride_split, o.stride_batch, o.stride_seqlen, o.stride_head};
  const auto& parts = c.lse_parts;
  t.lse_parts = {parts.data, parts.stride_split, parts.stride_batch, parts.stride_seqlen,
                 parts.stride_head};
  t.o = to_cpp(c.o);
  const auto& lse = c.softmax_lse;
  t.softmax_lse = {lse.data, lse.stride_batch, lse.stride_seqlen, lse.stride_head};
  return t;
}

template <class Body>
std::size_t guarded_text(char* text, std::size_t text_size, const Body& body) {
  if (text != nullptr && text_size > 0) text[0] = '\0';
  try {
    const Result<std::string> result = body();
    return result ? copy_text(*result, text, text_size) : 0;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

}  // namespace

Result<tessera::Problem> tessera::c::problem_of(const tessera_problem* from) {
  return ::to_cpp(from);
}

extern "C" {

void tessera_problem_init(tessera_problem* problem, size_t size) {
  tessera_problem defaults{};
  to_c(tessera::Problem{}, defaults);
  initialise(problem, size, defaults);
}

void tessera_tensors_init(tessera_tensors* tensors, size_t size) { initialise(tensors, size); }

void tessera_execution_init(tessera_execution* execution, size_t size) {
  initialise(execution, size);
}

tessera_code tessera_plan_create(const tessera_problem* problem, const char* device,
                                 tessera_plan** plan, char* error, size_t error_size) {
  if (plan == nullptr) return report(Status::invalid("plan = null"), error, error_size);
  *plan = nullptr;
  return guarded(error, error_size, [&]() -> Status {
    const auto p = to_cpp(problem);
    if (!p) return p.status();
    const auto where = to_device(device);
    if (!where) return where.status();
    const auto planned = tessera::plan(*p, *where);
    if (!planned) return planned.status();
    *plan = new tessera_plan{*planned, std::string(planned->kernel())};
    return {};
  });
}

void tessera_plan_destroy(tessera_plan* plan) { delete plan; }

size_t tessera_plan_workspace_bytes(const tessera_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

const char* tessera_plan_kernel(const tessera_plan* plan) {
  return plan == nullptr ? "" : plan->kernel.c_str();
}

tessera_code tessera_prepare(const tessera_plan* plan, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    if (plan == nullptr) return Status::invalid("plan = null");
    return tessera::prepare(plan->plan);
  });
}

tessera_code tessera_run(const tessera_plan* plan, const tessera_tensors* tensors, void* workspace,
                         size_t workspace_bytes, const tessera_execution* execution, char* error,
                         size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    if (plan == nullptr) return Status::invalid("plan = null");
    const auto t = to_cpp(tensors);
    if (!t) return t.status();
    Executed executed;
    if (Status s = executed.read(execution); !s) return s;
    return tessera::run(plan->plan, *t, workspace, workspace_bytes, *executed);
  });
}

tessera_code tessera_attend(const tessera_problem* problem, const tessera_tensors* tensors,
                            const char* device, const tessera_execution* execution, char* error,
                            size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    const auto p = to_cpp(problem);
    if (!p) return p.status();
    const auto t = to_cpp(tensors);
    if (!t) return t.status();
    Executed executed;
    if (Status s = executed.read(execution); !s) return s;
    if (device == nullptr) return tessera::attend(*p, *t, *executed);
    const auto where = to_device(device);
    if (!where) return where.status();
    return tessera::attend(*p, *t, *where, *executed);
  });
}

void tessera_partial_results_init(tessera_partial_results* results, size_t size) {
  const tessera::PartialResults defaults;
  tessera_partial_results c{};
  c.dtype = static_cast<std::int32_t>(defaults.dtype);
  c.dtype_o = static_cast<std::int32_t>(defaults.dtype_o);
  c.num_splits = defaults.num_splits;
  c.batch = defaults.batch;
  c.seqlen_q = defaults.seqlen_q;
  c.num_heads = defaults.num_heads;
  c.head_dim_v = defaults.head_dim_v;
  initialise(results, size, c);
}

void tessera_partial_tensors_init(tessera_partial_tensors* tensors, size_t size) {
  initialise(tensors, size);
}

tessera_code tessera_combine(const tessera_partial_results* results,
                             const tessera_partial_tensors* tensors, const char* device,
                             const tessera_execution* execution, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    const auto r = to_cpp(results);
    if (!r) return r.status();
    const auto t = to_cpp(tensors);
    if (!t) return t.status();
    Executed executed;
    if (Status s = executed.read(execution); !s) return s;
    if (device == nullptr) return tessera::combine(*r, *t, *executed);
    const auto where = to_device(device);
    if (!where) return where.status();
    return tessera::combine(*r, *t, *where, *executed);
  });
}

tessera_code tessera_needs_unaligned(const tessera_problem* problem, const tessera_tensors* tensors,
                                     int32_t* unaligned, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    if (unaligned == nullptr) return Status::invalid("unaligned = null");
    const auto p = to_cpp(problem);
    if (!p) return p.status();
    const auto t = to_cpp(tensors);
    if (!t) return t.status();
    *unaligned = tessera::needs_unaligned(*p, *t) ? 1 : 0;
    return {};
  });
}

size_t tessera_explain(const tessera_problem* problem, const char* device, char* text,
                       size_t text_size) {
  return guarded_text(text, text_size, [&]() -> Result<std::string> {
    const auto p = to_cpp(problem);
    if (!p) return p.status();
    const auto where = to_device(device);
    if (!where) return where.status();
    return tessera::explain(*p, *where);
  });
}

size_t tessera_problem_print(const tessera_problem* problem, char* text, size_t text_size) {
  return guarded_text(text, text_size, [&]() -> Result<std::string> {
    const auto p = to_cpp(problem);
    if (!p) return p.status();
    return tessera::to_string(*p);
  });
}

tessera_code tessera_problem_parse(const char* text, tessera_problem* problem, char* error,
                                   size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    if (text == nullptr) return Status::invalid("text = null");
    tessera_problem c;
    tessera_problem_init(&c, sizeof c);
    if (Status s = read_struct("problem", problem, c); !s) return s;
    const auto p = tessera::parse_problem(text);
    if (!p) return p.status();
    to_c(*p, c);
    std::memcpy(problem, &c, std::min(problem->size, sizeof c));
    return {};
  });
}

tessera_code tessera_dropout_mask(const tessera_problem* problem, uint64_t seed, uint64_t offset,
                                  uint8_t* keep, char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    const auto p = to_cpp(problem);
    if (!p) return p.status();
    return tessera::dropout_mask(*p, seed, offset, keep);
  });
}

tessera_code tessera_measure_peaks(const char* device, double seconds,
                                   const tessera_executor* executor, tessera_peaks* peaks,
                                   char* error, size_t error_size) {
  return guarded(error, error_size, [&]() -> Status {
    tessera_peaks c{};
    if (Status s = read_struct("peaks", peaks, c); !s) return s;
    const auto where = to_device(device);
    if (!where) return where.status();
    const auto e = executor == nullptr ? Result(tessera::default_executor()) : to_cpp(executor);
    if (!e) return e.status();
    const auto measured = tessera::measure_peaks(*where, seconds, &*e);
    if (!measured) return measured.status();
    c.f32_flops = measured->f32_flops;
    c.bf16_flops = measured->bf16_flops;
    c.read_bytes = measured->read_bytes;
    std::memcpy(peaks, &c, std::min(peaks->size, sizeof c));
    return {};
  });
}

const char* tessera_version(void) { return tessera::version(); }

}  // extern "C"
