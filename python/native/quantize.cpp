#include "quantize.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "cache.h"
#include "checks.h"
#include "scaled.h"

namespace tessera::python {

namespace {

/// What the tensors are held against.
struct First {
  const char* name;
  const View& view;
};

void check_dims(const char* name, const View& view, bool packed) {
  if (!view || view.ndim == (packed ? 3 : 4)) return;
  invalid(std::string(name) + " has shape " + shape_text(view) + ": must be " +
          (packed ? "(total, heads, head_dim), since cu_seqlens_q is given"
                  : "(batch, seqlen, heads, head_dim); with cu_seqlens_q (total, heads, "
                    "head_dim)"));
}

void check_longest(const char* name, std::int64_t longest) {
  if (longest >= 0 && longest <= kMaxSeqlen) return;
  invalid(value(name, "", longest) + ": must lie in [0, " + std::to_string(kMaxSeqlen) + "]");
}

/// The number of packed sequences.
std::int64_t read_cu_seqlens(const QuantizeInputs& in, const First& first) {
  const View &of_q = in.cu_seqlens_q, &of_k = in.cu_seqlens_k;
  check_array("cu_seqlens_q", of_q, first.view, kInt32, "(batch + 1,)",
              of_q.ndim == 1 && of_q.shape[0] >= 1, first.name);
  check_array("cu_seqlens_k", of_k, first.view, kInt32, "(batch + 1,), like cu_seqlens_q",
              of_k.ndim == 1 && of_k.shape[0] == of_q.shape[0], first.name);
  return of_q.shape[0] - 1;
}

/// Heads of k and v where neither is there.
std::int64_t heads_without_k(const QuantizeInputs& in, const QuantizeOptions& options,
                             std::int64_t heads_q) {
  if (in.k_mean && in.k_mean.ndim == 3) return in.k_mean.shape[1];
  if (options.q_given && in.q_scale.ndim == 2) return in.q_scale.shape[1];
  return heads_q;
}

/// Sizes, of what is there; of the rest such that nothing depends on them.
void read_sizes(const QuantizeInputs& in, const QuantizeOptions& options, const First& first,
                Problem& p) {
  const Axes axes(p.packed);
  const View& rows_k = in.k ? in.k : in.v;
  const View& rows_q = in.q ? in.q : rows_k;
  const auto size = [](const View& view, std::size_t axis) { return view.shape[axis]; };
  p.batch = p.packed ? read_cu_seqlens(in, first) : size(first.view, 0);
  p.num_heads_k =
      rows_k ? size(rows_k, axes.heads) : heads_without_k(in, options, size(rows_q, axes.heads));
  p.num_heads = size(rows_q, axes.heads);
  p.head_dim = size(in.q ? in.q : rows_k, axes.dim);
  p.head_dim_v = in.v ? size(in.v, axes.dim) : p.head_dim;
  const std::int64_t of_q = size(rows_q, axes.rows);
  const std::int64_t of_k = rows_k ? size(rows_k, axes.rows) : of_q;
  if (!p.packed) {
    p.seqlen_q = of_q;
    p.seqlen_k = of_k;
    return;
  }
  check_longest("max_seqlen_q", options.max_seqlen_q);
  check_longest("max_seqlen_k", options.max_seqlen_k);
  p.total_q = of_q;
  p.total_k = of_k;
  p.seqlen_q = options.max_seqlen_q;
  p.seqlen_k = options.max_seqlen_k;
}

void check_rows(const QuantizeInputs& in, const First& first, const Problem& p) {
  const std::int64_t rows_q = p.packed ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = p.packed ? p.total_k : p.seqlen_k;
  const std::array q = {p.batch, rows_q, p.num_heads, p.head_dim};
  const std::array k = {p.batch, rows_k, p.num_heads_k, p.head_dim};
  const std::array v = {p.batch, rows_k, p.num_heads_k, p.head_dim_v};
  for (const auto& [name, from, to, shape] : {std::tuple{"q", &in.q, &in.q_out, &q},
                                              {"k", &in.k, &in.k_out, &k},
                                              {"v", &in.v, &in.v_out, &v}}) {
    if (!*from) continue;
    check_same_type(name, *from, first.view, first.name);
    python::check_rows(name, *from, first.view, *shape, p.packed, first.name);
    const std::string out = std::string(name) + "_out";
    if (from == &in.v && p.v_tiles) {
      check_tiles(out.c_str(), *to, first.view, p, first.name);
    } else {
      python::check_rows(out.c_str(), *to, first.view, *shape, p.packed, first.name);
    }
  }
}

/// Of what is there; a problem has some of what is not, too.
ScaleShape read_scales(const QuantizeInputs& in, const QuantizeOptions& options, const First& first,
                       const Problem& p) {
  const auto meaning = [&](const char* name, const View& view,
                           std::initializer_list<Meaning> meanings) {
    return meaning_of(name, view, first.view, meanings, {}, first.name);
  };
  ScaleShape s;
  s.q = s.k = Scaling::tensor;
  if (in.q) {
    s.q = options.q_given ? meaning("q_scale", in.q_scale, {by_tensor(), by_head(p)})
                          : meaning("q_scale", in.q_scale, {by_token(p)});
  }
  if (in.k) {
    if (!options.k_given) check_block("k_block", s.block_k = options.k_block);
    s.k = options.k_given ? meaning("k_scale", in.k_scale, {by_tensor(), by_head(p)})
                          : meaning("k_scale", in.k_scale, {by_block(p, s.block_k)});
  }
  if (in.v) {
    if (!options.v_given) check_block("v_block", s.block_v = options.v_block);
    s.v = options.v_given ? meaning("v_scale", in.v_scale, {by_tensor(), by_head(p), by_channel(p)})
                          : meaning("v_scale", in.v_scale, {by_block(p, s.block_v)});
  }
  s.score_shift = static_cast<bool>(in.k_mean);
  if (in.k_mean) {
    const Meaning mean = {Scaling::channel,
                          "(batch, num_heads_k, head_dim)",
                          3,
                          {p.batch, p.num_heads_k, p.head_dim}};
    meaning("k_mean", in.k_mean, {mean});
    if (in.q) meaning("score_shift", in.score_shift, {by_token(p)});
  }
  s.v_shift = static_cast<bool>(in.v_shift);
  if (s.v_shift) meaning("v_shift", in.v_shift, {by_channel(p)});
  return s;
}

}  // namespace

std::pair<const char*, const View&> QuantizeInputs::first() const {
  if (q) return {"q", q};
  if (k) return {"k", k};
  if (v) return {"v", v};
  invalid("q, k and v are None: at least one of them is quantised");
}

QuantizeShape shape_of(const QuantizeInputs& in, const QuantizeOptions& options) {
  const auto [name, view] = in.first();
  const First first = {name, view};
  QuantizeShape s;
  s.dtype = storage_type(view, name);
  Problem& p = s.problem;
  p.packed = in.cu_seqlens_q || in.cu_seqlens_k;
  for (const auto& [rows_name, rows] : {std::pair{"q", &in.q}, {"k", &in.k}, {"v", &in.v}}) {
    check_dims(rows_name, *rows, p.packed);
  }
  read_sizes(in, options, first, p);
  const View& out = in.q ? in.q_out : in.k ? in.k_out : in.v_out;
  p.dtype = scaled_type(out).value_or(Dtype::f32);  // which the library refuses
  if (!in.v) p.dtype_v = Dtype::bf16;               // then v is not looked at
  p.v_tiles = in.v && options.v_tiles;
  check_rows(in, first, p);
  p.scales = read_scales(in, options, first, p);
  s.hadamard = static_cast<int>(std::clamp<std::int64_t>(options.hadamard, INT32_MIN, INT32_MAX));
  s.signs = static_cast<bool>(in.signs);
  if (in.signs) {
    check_array("signs", in.signs, view, kFloat32, "(head_dim,)",
                in.signs.ndim == 1 && in.signs.shape[0] == p.head_dim, name);
  }
  if (in.rotary_cos || in.rotary_sin) {
    RotaryShape rotary = rotary_of(in.rotary_cos, in.rotary_sin, view, name, s.dtype, p.head_dim);
    rotary.interleaved = options.rotary_interleaved;
    rotary.constant_q = options.rotary_constant_q;
    s.rotary = rotary;
  } else if (in.rotary_seqlens) {
    invalid("rotary_seqlens is given, but rotary_cos is None");
  }
  if (in.rotary_seqlens) {
    check_array("rotary_seqlens", in.rotary_seqlens, view, kInt32, "(batch,)",
                in.rotary_seqlens.ndim == 1 && in.rotary_seqlens.shape[0] == p.batch, name);
  }
  return s;
}

QuantizeTensors tensors_of(const QuantizeInputs& in, const QuantizeShape& s) {
  const Problem& p = s.problem;
  QuantizeTensors t;
  if (in.q) {
    t.q = rows_of(in.q, p.packed);
    t.q_out = rows_of(in.q_out, p.packed);
    t.q_scale = scales_of(in.q_scale, p.scales.q);
    t.score_shift = scales_of(in.score_shift, Scaling::token);
  }
  if (in.k) {
    t.k = rows_of(in.k, p.packed);
    t.k_out = rows_of(in.k_out, p.packed);
    t.k_scale = scales_of(in.k_scale, p.scales.k);
  }
  if (in.v) {
    t.v = rows_of(in.v, p.packed);
    t.v_out = p.v_tiles ? tiles_of(in.v_out, p.packed) : rows_of(in.v_out, p.packed);
    t.v_scale = scales_of(in.v_scale, p.scales.v);
  }
  t.k_mean = scales_of(in.k_mean, Scaling::channel);
  t.v_shift = scales_of(in.v_shift, Scaling::channel);
  t.signs = pointer<const float>(in.signs);
  t.cu_seqlens_q = pointer<const std::int32_t>(in.cu_seqlens_q);
  t.cu_seqlens_k = pointer<const std::int32_t>(in.cu_seqlens_k);
  if (s.rotary) t.rotary = rotary_tensors(in.rotary_cos, in.rotary_sin, in.rotary_seqlens);
  return t;
}

}  // namespace tessera::python
