#include "call.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "checks.h"
#include "execution.h"
#include "scaled.h"

namespace tessera::python {

namespace {

/// Number of sequences of a packed batch.
std::int64_t check_cu_seqlens(const Inputs& in) {
  if (!in.cu_seqlens_k) invalid("cu_seqlens_k is None, but cu_seqlens_q is given: both or neither");
  check_array("cu_seqlens_q", in.cu_seqlens_q, in.q, kInt32, "(batch + 1,)",
              in.cu_seqlens_q.ndim == 1 && in.cu_seqlens_q.shape[0] >= 1);
  check_array("cu_seqlens_k", in.cu_seqlens_k, in.q, kInt32, "(batch + 1,), like cu_seqlens_q",
              in.cu_seqlens_k.ndim == 1 && in.cu_seqlens_k.shape[0] == in.cu_seqlens_q.shape[0]);
  return in.cu_seqlens_q.shape[0] - 1;
}

/// Whether so many packed sequences of at most max_seqlen_q or max_seqlen_k rows can hold the rows.
void check_longest(const std::string& name, const View& view, std::int64_t batch,
                   std::int64_t longest) {
  const std::string text = "max_seqlen_" + name + " = " + std::to_string(longest);
  if (longest < 0 || longest > kMaxSeqlen) {
    invalid(text + ": must lie in [0, " + std::to_string(kMaxSeqlen) + "]");
  }
  if (view.shape[0] > batch * longest) {
    invalid(name + " has " + std::to_string(view.shape[0]) + " rows: the " + std::to_string(batch) +
            " sequences of cu_seqlens_" + name + " hold " + std::to_string(batch * longest) +
            " at most, with " + text);
  }
}

/// Size of dimension i of (batch, num_heads, seqlen_q, seqlen_k); missing leading ones are 1.
std::int64_t bias_size(const View& bias, std::size_t i) {
  const auto missing = static_cast<std::size_t>(4 - bias.ndim);
  return i < missing ? 1 : bias.shape[i - missing];
}

std::int64_t bias_stride(const View& bias, std::size_t i) {
  const auto missing = static_cast<std::size_t>(4 - bias.ndim);
  return i < missing ? 0 : bias.strides[i - missing];
}

BiasShape bias_shape(const Inputs& in, const Problem& p) {
  const View& bias = in.bias;
  const std::int64_t full[4] = {p.batch, p.num_heads, p.seqlen_q, p.seqlen_k};
  bool stored[4] = {};
  bool fits = bias.ndim <= 4;
  for (std::size_t i = 0; fits && i < 4; ++i) {
    stored[i] = bias_size(bias, i) == full[i];
    fits = stored[i] || bias_size(bias, i) == 1;
  }
  if (!fits) {
    invalid("bias has shape " + shape_text(bias) + ": must be (" + std::to_string(full[0]) +
            " or 1, " + std::to_string(full[1]) + " or 1, " + std::to_string(full[2]) + " or 1, " +
            std::to_string(full[3]) + " or 1)");
  }
  const bool wide = same(bias.dtype, kFloat32);
  if (!wide && (is_scaled(p.dtype) || !same(bias.dtype, in.q.dtype))) {
    invalid("bias.dtype = " + name_of(bias.dtype) + ": must be float32" +
            (is_scaled(p.dtype) ? std::string() : " or q's type, " + name_of(in.q.dtype)));
  }
  check_device("bias", bias, in.q);
  return {stored[0], stored[1], stored[2], stored[3], wide ? Dtype::f32 : p.dtype};
}

/// Sizes of a problem, from tensors whose number of dimensions is checked here.
void read_sizes(const Inputs& in, const Options& options, Problem& p) {
  const View& q = in.q;
  if (!p.packed && in.cu_seqlens_k) {
    invalid("cu_seqlens_q is None, but cu_seqlens_k is given: both or neither");
  }
  for (const auto& [name, view] : {std::pair{"q", &q}, {"k", &in.k}, {"v", &in.v}}) {
    if (!*view) invalid(std::string(name) + " is None: a tensor is required");
    if (view == &in.v && p.v_tiles) continue;
    if (view->ndim != (p.packed ? 3 : 4)) check_rows(name, *view, q, {}, p.packed);
  }
  const Axes axes(p.packed);
  p.batch = p.packed ? check_cu_seqlens(in) : q.shape[0];
  p.num_heads = q.shape[axes.heads];
  p.num_heads_k = in.k.shape[axes.heads];
  p.head_dim = q.shape[axes.dim];
  if (!p.v_tiles) p.head_dim_v = in.v.shape[axes.dim];
  if (p.packed) {
    check_longest("q", q, p.batch, options.max_seqlen_q);
    check_longest("k", in.k, p.batch, options.max_seqlen_k);
  }
  p.seqlen_q = p.packed ? options.max_seqlen_q : q.shape[axes.rows];
  p.seqlen_k = p.packed ? options.max_seqlen_k : in.k.shape[axes.rows];
  if (p.packed) {
    p.total_q = q.shape[axes.rows];
    p.total_k = in.k.shape[axes.rows];
  }
}

/// Every tensor of rows that is given, and lse and its gradient, against the sizes.
void check_shapes(const Inputs& in, const Problem& p) {
  const std::int64_t rows_q = p.packed ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = p.packed ? p.total_k : p.seqlen_k;
  const std::array q_shape = {p.batch, rows_q, p.num_heads, p.head_dim};
  const std::array k_shape = {p.batch, rows_k, p.num_heads_k, p.head_dim};
  const std::array v_shape = {p.batch, rows_k, p.num_heads_k, p.head_dim_v};
  const std::array o_shape = {p.batch, rows_q, p.num_heads, p.head_dim_v};
  const bool scaled = is_scaled(p.dtype);  // then v and o have types of their own
  const auto check_given = [&](const char* name, const View& view, const auto& shape,
                               bool own_type = false) {
    if (!view) return;
    if (!own_type) check_same_type(name, view, in.q);
    check_rows(name, view, in.q, shape, p.packed);
  };
  check_given("q", in.q, q_shape);
  check_given("k", in.k, k_shape, scaled);
  if (p.v_tiles) {
    check_tiles("v", in.v, in.q, p);
  } else {
    check_given("v", in.v, v_shape, scaled);
  }
  check_given("o", in.o, o_shape, scaled);
  check_given("qv", in.qv, o_shape);
  check_given("dout", in.dout, o_shape);
  check_given("dq", in.dq, q_shape);
  check_given("dk", in.dk, k_shape);
  check_given("dv", in.dv, v_shape);
  if (in.softmax_lse) check_lse("lse", in.softmax_lse, in.q, p);
  if (in.dsoftmax_lse) check_lse("dlse", in.dsoftmax_lse, in.q, p);
}

void check_dbias(const Inputs& in) {
  if (!in.bias) invalid("dbias is given, but bias is None");
  bool fits = in.dbias.ndim <= 4 && same(in.dbias.dtype, in.bias.dtype);
  for (std::size_t i = 0; fits && i < 4; ++i) {
    fits = bias_size(in.dbias, i) == bias_size(in.bias, i);
  }
  if (!fits) {
    invalid("dbias has shape " + shape_text(in.dbias) + " and type " + name_of(in.dbias.dtype) +
            ": must be like bias, " + shape_text(in.bias) + " and " + name_of(in.bias.dtype));
  }
  check_device("dbias", in.dbias, in.q);
}

/// A tensor of a merge: its device and its dimensions.
void check_partial(const char* name, const View& view, const View& o_parts,
                   std::initializer_list<std::int64_t> shape) {
  if (!view) invalid(std::string(name) + " is None: a tensor is required");
  check_device(name, view, o_parts, "o_parts");
  check_sizes(name, view, shape);
}

void check_partial_lse(const char* name, const View& view) {
  if (same(view.dtype, kFloat32)) return;
  invalid(std::string(name) + ".dtype = " + name_of(view.dtype) + ": must be float32");
}

}  // namespace

Problem problem_of(const Inputs& in, const Options& options, const ScaleInputs* scales) {
  if (!in.q) invalid("q is None: a tensor is required");
  Problem p;
  p.pass = options.pass;
  if (scales == nullptr) {
    p.dtype = storage_type(in.q, "q", "; tessera.scaled_attention takes 8 bits with their scales");
  }
  p.packed = static_cast<bool>(in.cu_seqlens_q);
  p.qv = static_cast<bool>(in.qv);
  if (scales != nullptr && scales->head_dim_v) read_tiles(*scales->head_dim_v, p);
  read_sizes(in, options, p);
  if (scales != nullptr) read_types(in, p);
  check_shapes(in, p);
  if (scales != nullptr) p.scales = scale_shape(*scales, in, p);
  check_window("window[0]", options.window_left);
  check_window("window[1]", options.window_right);
  p.softmax_scale = options.softmax_scale;
  p.softcap = options.softcap;
  p.window_left = options.window_left;
  p.window_right = options.window_right;
  p.alignment = options.top_left ? Alignment::top_left : Alignment::bottom_right;
  p.dropout_p = options.dropout_p;
  p.deterministic = options.deterministic;
  p.batch_invariant = options.batch_invariant;
  if (in.alibi_slopes) p.alibi = alibi_shape(in.alibi_slopes, in.q, p);
  if (in.bias) p.bias = bias_shape(in, p);
  if (in.dbias) check_dbias(in);
  p.sink = static_cast<bool>(in.sink);
  if (in.sink) check_sink("sink", in.sink, in.q, p);
  if (in.dsink && !in.sink) invalid("dsink is given, but sink is None");
  if (in.dsink) check_sink("dsink", in.dsink, in.q, p);
  if (in.q.on_gpu()) {
    if (p.dtype == Dtype::f32) {
      throw Raise{PyExc_NotImplementedError,
                  "q.dtype = float32: on a GPU it must be bfloat16 or float16 (a CPU takes "
                  "float32, too)"};
    }
    p.unaligned = needs_unaligned(p, tensors_of(in, options, p));
  }
  return p;
}

Problem problem_of_mask(const View& keep, float dropout_p) {
  constexpr DLType kUint8 = {kDLUInt, 8, 1};
  if (!keep) invalid("keep is None: a tensor is required");
  if (keep.on_gpu()) invalid("keep is on " + name_of(keep.device) + ": must be on the CPU");
  check_array("keep", keep, keep, kUint8, "(batch, num_heads, seqlen_q, seqlen_k)", keep.ndim == 4);
  Problem p;
  p.batch = keep.shape[0];
  p.num_heads = p.num_heads_k = keep.shape[1];
  p.seqlen_q = keep.shape[2];
  p.seqlen_k = keep.shape[3];
  p.head_dim = p.head_dim_v = 1;
  p.dropout_p = dropout_p;
  return p;
}

Tensors tensors_of(const Inputs& in, const Options& options, const Problem& p) {
  Tensors t;
  t.q = rows_of(in.q, p.packed);
  t.k = rows_of(in.k, p.packed);
  t.v = p.v_tiles ? tiles_of(in.v, p.packed) : rows_of(in.v, p.packed);
  if (in.qv) t.qv = rows_of(in.qv, p.packed);
  t.o = rows_of(in.o, p.packed);
  t.softmax_lse = pointer<float>(in.softmax_lse);
  if (in.bias) {
    t.bias = {in.bias.data, bias_stride(in.bias, 0), bias_stride(in.bias, 1),
              bias_stride(in.bias, 2), bias_stride(in.bias, 3)};
  }
  t.alibi_slopes = pointer<const float>(in.alibi_slopes);
  t.sink = pointer<const float>(in.sink);
  t.cu_seqlens_q = pointer<const std::int32_t>(in.cu_seqlens_q);
  t.cu_seqlens_k = pointer<const std::int32_t>(in.cu_seqlens_k);
  t.philox_seed = options.seed;
  t.philox_offset = options.offset;
  if (p.pass == Pass::forward) return t;
  t.dout = rows_of(in.dout, p.packed);
  t.dsoftmax_lse = pointer<const float>(in.dsoftmax_lse);
  t.dq = rows_of(in.dq, p.packed);
  t.dk = rows_of(in.dk, p.packed);
  t.dv = rows_of(in.dv, p.packed);
  if (in.dbias) {
    t.dbias = {in.dbias.data, bias_stride(in.dbias, 0), bias_stride(in.dbias, 1),
               bias_stride(in.dbias, 2), bias_stride(in.dbias, 3)};
  }
  t.dsink = pointer<float>(in.dsink);
  return t;
}

PartialResults results_of(const PartialInputs& in) {
  const View& parts = in.o_parts;
  if (!parts) invalid("o_parts is None: a tensor is required");
  if (parts.ndim != 4 && parts.ndim != 5) {
    invalid("o_parts has shape " + shape_text(parts) +
            ": must be (num_splits, batch, seqlen, heads, head_dim) or (num_splits, total, heads, "
            "head_dim)");
  }
  const bool packed = parts.ndim == 4;
  const std::int64_t* const sizes = parts.shape.data() + (packed ? 0 : 1);
  PartialResults r;
  r.dtype = storage_type(parts, "o_parts");
  r.num_splits = parts.shape[0];
  r.batch = packed ? 1 : parts.shape[1];
  r.seqlen_q = sizes[1];
  r.num_heads = sizes[2];
  r.head_dim_v = sizes[3];
  const std::int64_t n = r.num_splits, b = r.batch, q = r.seqlen_q, h = r.num_heads,
                     d = r.head_dim_v;
  check_last_stride("o_parts", parts);
  if (packed) {
    check_partial("lse_parts", in.lse_parts, parts, {n, h, q});
    check_partial("o", in.o, parts, {q, h, d});
    if (in.lse) check_partial("lse", in.lse, parts, {h, q});
  } else {
    check_partial("lse_parts", in.lse_parts, parts, {n, b, h, q});
    check_partial("o", in.o, parts, {b, q, h, d});
    if (in.lse) check_partial("lse", in.lse, parts, {b, h, q});
  }
  check_partial_lse("lse_parts", in.lse_parts);
  if (in.lse) check_partial_lse("lse", in.lse);
  check_last_stride("o", in.o);
  r.dtype_o = storage_type(in.o, "o");
  return r;
}

PartialTensors tensors_of(const PartialInputs& in) {
  const bool packed = in.o_parts.ndim == 4;
  // Strides of heads and rows, from the end; of the batch where there is one.
  const auto stride = [](const View& view, int from_end) {
    return view.strides[static_cast<std::size_t>(view.ndim - from_end)];
  };
  const auto batch = [&](const View& view, int from_end) {
    return packed ? 0 : stride(view, from_end);
  };
  PartialTensors t;
  t.o_parts = {in.o_parts.data, in.o_parts.strides[0], batch(in.o_parts, 4), stride(in.o_parts, 3),
               stride(in.o_parts, 2)};
  t.lse_parts = {pointer<const float>(in.lse_parts), in.lse_parts.strides[0],
                 batch(in.lse_parts, 3), stride(in.lse_parts, 1), stride(in.lse_parts, 2)};
  t.o = {in.o.data, batch(in.o, 4), stride(in.o, 3), stride(in.o, 2)};
  if (in.lse) {
    t.softmax_lse = {pointer<float>(in.lse), batch(in.lse, 3), stride(in.lse, 1),
                     stride(in.lse, 2)};
  }
  return t;
}

Device device_of(const View& q, const char* name) {
  if (!q.on_gpu()) {
    if (q.device.type != kDLCPU && q.device.type != kDLCUDAHost) {
      invalid(std::string(name) + " is on " + name_of(q.device) +
              ": must be on the CPU or a CUDA device");
    }
    static const Device cpu = this_cpu();
    return cpu;
  }
  static std::unordered_map<int, Device> gpus;  // the interpreter's lock is held
  if (const auto found = gpus.find(q.device.id); found != gpus.end()) return found->second;
  const Result<Device> gpu = this_gpu(q.device.id);
  check(gpu.status());
  return gpus.emplace(q.device.id, *gpu).first->second;
}

Plan plan_for(const Problem& problem, const Device& device) {
  struct Key {
    Problem problem;
    Arch arch;
    int ordinal;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      return std::hash<Problem>{}(key.problem) * 31 + static_cast<std::size_t>(key.ordinal);
    }
  };
  // Sequences of ever new lengths would fill it.
  constexpr std::size_t kMostPlans = 4096;
  static std::unordered_map<Key, Plan, Hash> plans;  // the interpreter's lock is held
  const Key key{problem, device.arch, device.ordinal};
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  const Result<Plan> made = plan(problem, device);
  check(made.status());
  if (plans.size() >= kMostPlans) plans.clear();
  return plans.emplace(key, *made).first->second;
}

}  // namespace tessera::python
