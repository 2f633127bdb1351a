#include "scaled.h"

#include <algorithm>

#include "checks.h"

namespace tessera::python {

namespace {

/// The type of q, k, v or o for errors, where NumPy's bits stand for types that it does not export.
std::string type_of(const View& view) {
  if (scaled_type(view) == Dtype::e4m3) return name_of(kFloat8E4m3);
  return same(view.dtype, kBfloat16Bits) ? name_of(kBfloat16) : name_of(view.dtype);
}

}  // namespace

bool Meaning::fits(const View& view) const {
  if (by == Scaling::tensor) return view.ndim == 0 || (view.ndim == 1 && view.shape[0] == 1);
  // Packed rows may have a first dimension of 1, which no other scaling of q has.
  const bool led = by == Scaling::token && ndim == 2 && view.ndim == 3 && view.shape[0] == 1;
  return view.ndim == ndim + (led ? 1 : 0) &&
         std::equal(sizes.begin(), sizes.begin() + ndim, view.shape.begin() + (led ? 1 : 0));
}

std::string Meaning::text() const {
  if (by == Scaling::tensor) return names;
  std::string numbers;
  for (int i = 0; i < ndim; ++i) {
    numbers += (i > 0 ? ", " : "") + std::to_string(sizes[static_cast<std::size_t>(i)]);
  }
  return std::string(names) + " = (" + numbers + ")";
}

Meaning by_tensor() { return {Scaling::tensor, "()", 0, {}}; }

Meaning by_head(std::int64_t batch, std::int64_t num_heads_k) {
  return {Scaling::head, "(batch, num_heads_k)", 2, {batch, num_heads_k}};
}

Meaning by_block(const Problem& p, std::int64_t block) {
  const std::int64_t blocks = p.scale_blocks(block);
  if (p.packed) return {Scaling::block, "(num_heads_k, blocks)", 2, {p.num_heads_k, blocks}};
  return {Scaling::block, "(batch, num_heads_k, blocks)", 3, {p.batch, p.num_heads_k, blocks}};
}

Meaning by_channel(const Problem& p) {
  return {Scaling::channel,
          "(batch, num_heads_k, head_dim_v)",
          3,
          {p.batch, p.num_heads_k, p.head_dim_v}};
}

Meaning by_token(const Problem& p) {
  if (p.packed) return {Scaling::token, "([1,] num_heads, total_q)", 2, {p.num_heads, p.total_q}};
  return {Scaling::token, "(batch, num_heads, seqlen_q)", 3, {p.batch, p.num_heads, p.seqlen_q}};
}

Meaning by_slot(const View& cache) {
  return {Scaling::token,
          "k_cache's without head_dim",
          3,
          {cache.shape[0], cache.shape[1], cache.shape[2]},
          true};
}

Meaning by_group(const View& cache, std::int64_t groups) {
  return {Scaling::group,
          "v_cache's with groups that divide head_dim_v in its place",
          4,
          {cache.shape[0], cache.shape[1], cache.shape[2], groups}};
}

Scaling meaning_of(const char* name, const View& view, const View& q,
                   std::initializer_list<Meaning> meanings, const std::string& why,
                   const char* first) {
  const auto* const found = std::find_if(meanings.begin(), meanings.end(),
                                         [&](const Meaning& m) { return m.fits(view); });
  if (!view || found == meanings.end()) {
    std::string accepted;
    for (const auto* m = meanings.begin(); m != meanings.end(); ++m) {
      accepted += (m == meanings.begin() ? "" : m + 1 == meanings.end() ? " or " : ", ");
      accepted += m->text();
    }
    invalid(std::string(name) + (view ? " has shape " + shape_text(view) : " is None") +
            ": must be " + accepted + why);
  }
  if (!same(view.dtype, kFloat32)) {
    invalid(std::string(name) + ".dtype = " + name_of(view.dtype) + ": must be float32");
  }
  check_device(name, view, q, first);
  const bool any_strides =
      found->any_strides || found->by == Scaling::tensor || found->by == Scaling::head;
  if (!any_strides) check_last_stride(name, view);
  return found->by;
}

void check_block(const char* name, std::int64_t block) {
  if (block >= 0 && block <= kMaxSeqlen) return;
  invalid(value(name, "", block) + ": must lie in [1, " + std::to_string(kMaxSeqlen) +
          "], or be 0 where scales are not by block");
}

Scales scales_of(const View& view, Scaling by) {
  // By counting from the end, where batch, head and what a head has stand.
  const auto stride = [&](int from_end) {
    return view.ndim < from_end ? 0 : view.strides[static_cast<std::size_t>(view.ndim - from_end)];
  };
  auto* const data = pointer<float>(view);
  if (!view || by == Scaling::tensor) return {data};
  if (by == Scaling::head) return {data, stride(2), stride(1)};
  return {data, stride(3), stride(2)};
}

void read_tiles(std::int64_t head_dim_v, Problem& p) {
  constexpr std::int64_t kMost = 256;
  if (head_dim_v < 1 || head_dim_v > kMost) {
    invalid(value("head_dim_v", "", head_dim_v) + ": must lie in [1, " + std::to_string(kMost) +
            "], the columns of tiles, or be None where v lies in rows");
  }
  p.v_tiles = true;
  p.head_dim_v = head_dim_v;
}

void read_types(const Inputs& in, Problem& p) {
  const std::optional<Dtype> type = scaled_type(in.q), type_v = scaled_type(in.v);
  if (!type) {
    invalid("q.dtype = " + type_of(in.q) +
            ": must be float8_e4m3fn or int8; tessera.attention takes types without scales");
  }
  p.dtype = *type;
  if (scaled_type(in.k) != type) {
    invalid("k.dtype = " + type_of(in.k) + ", but q.dtype = " + type_of(in.q) +
            ": they must be the same");
  }
  const bool same_v = type_v == type;
  if (!same_v) {
    const bool bf16 = same(in.v.dtype, kBfloat16) || same(in.v.dtype, kBfloat16Bits);
    if (!bf16 && !same(in.v.dtype, kFloat16)) {
      invalid("v.dtype = " + type_of(in.v) + ": must be q's type, " + type_of(in.q) +
              ", or bfloat16 or float16");
    }
    p.dtype_v = bf16 ? Dtype::bf16 : Dtype::f16;
  }
  if (!in.o) return;
  const Dtype o = storage_type(in.o, "o");
  if (!same_v && o != *p.dtype_v && o != Dtype::f32) {
    invalid("o.dtype = " + type_of(in.o) + ": must be float32 or v's type, " + type_of(in.v));
  }
  if (o != p.stored_o()) p.dtype_o = o;
}

ScaleShape scale_shape(const ScaleInputs& scales, const Inputs& in, const Problem& p) {
  const View& q = in.q;
  const std::string needed =
      "; values of " + type_of(q) + " are elements times a scale, and a missing one is not 1";
  const auto why = [&](const View& scale) { return scale ? std::string() : needed; };
  check_block("k_block", scales.k_block);
  check_block("v_block", scales.v_block);
  ScaleShape s;
  s.q = meaning_of("q_scale", scales.q_scale, q, {by_tensor(), by_head(p), by_token(p)},
                   why(scales.q_scale));
  const auto of_block = [](const char* name, std::int64_t block) {
    return ", as " + value(name, "", block);
  };
  s.block_k = scales.k_block;
  s.k = s.block_k > 0 ? meaning_of("k_scale", scales.k_scale, q, {by_block(p, s.block_k)},
                                   of_block("k_block", s.block_k) + why(scales.k_scale))
                      : meaning_of("k_scale", scales.k_scale, q, {by_tensor(), by_head(p)},
                                   scales.k_scale ? ", or by k_block" : needed);
  if (is_scaled(p.stored_v())) {
    s.block_v = scales.v_block;
    s.v = s.block_v > 0
              ? meaning_of("v_scale", scales.v_scale, q, {by_block(p, s.block_v)},
                           of_block("v_block", s.block_v) + why(scales.v_scale))
              : meaning_of("v_scale", scales.v_scale, q, {by_tensor(), by_head(p), by_channel(p)},
                           scales.v_scale ? ", or by v_block" : needed);
  } else if (scales.v_scale || scales.v_block > 0) {
    invalid(std::string(scales.v_scale ? "v_scale" : "v_block") +
            " is given, but v.dtype = " + type_of(in.v) + ": only v of 8 bits has scales");
  }
  s.score_shift = static_cast<bool>(scales.score_shift);
  s.v_shift = static_cast<bool>(scales.v_shift);
  if (s.score_shift) meaning_of("score_shift", scales.score_shift, q, {by_token(p)}, {});
  if (s.v_shift) meaning_of("v_shift", scales.v_shift, q, {by_channel(p)}, {});
  return s;
}

std::optional<CachedScales> read_cached_scales(const View& k_cache, const View& v_cache,
                                               const View& k_scale, const View& v_scale,
                                               const Meaning& of_heads) {
  const std::optional<Dtype> type_k = scaled_type(k_cache), type = scaled_type(v_cache);
  if (type_k && type_k != type) {
    invalid("v_cache.dtype = " + type_of(v_cache) + ", but k_cache.dtype = " + type_of(k_cache) +
            ": they must be the same");
  }
  for (const auto& [name, scale, cache] :
       {std::tuple{"k_scale", &k_scale, &k_cache}, {"v_scale", &v_scale, &v_cache}}) {
    if (!*scale || scaled_type(*cache)) continue;
    invalid(std::string(name) + " is given, but " + name[0] + "_cache.dtype = " + type_of(*cache) +
            ": only caches of 8 bits have scales");
  }
  if (!type) return std::nullopt;
  const std::string needed =
      "; values of " + type_of(v_cache) + " are elements times a scale, and a missing one is not 1";
  CachedScales scales{*type};
  const auto read = [&](const char* name, const View& scale,
                        std::initializer_list<Meaning> meanings) {
    return meaning_of(name, scale, k_cache, meanings, scale ? std::string() : needed, "k_cache");
  };
  if (type_k) {
    scales.k = read("k_scale", k_scale, {by_tensor(), of_heads, by_slot(k_cache)});
  }
  const std::int64_t dim = v_cache.shape[3];
  const bool grouped = v_scale.ndim == 4 && v_scale.shape[3] > 0 && dim % v_scale.shape[3] == 0;
  const std::int64_t groups = grouped ? v_scale.shape[3] : 1;
  scales.v = read("v_scale", v_scale,
                  {by_tensor(), of_heads, by_slot(v_cache), by_group(v_cache, groups)});
  if (scales.v == Scaling::group) scales.block_v = dim / groups;
  return scales;
}

Scales cached_scales_of(const View& view, Scaling by) {
  auto* const data = pointer<float>(view);
  if (!view || by == Scaling::tensor) return {data};
  if (by == Scaling::head) return {data, view.strides[0], view.strides[1]};
  return {data, view.strides[0], view.strides[2], view.strides[1]};
}

void add_scales(const ScaleInputs& scales, const Problem& p, Tensors& t) {
  t.q_scale = scales_of(scales.q_scale, p.scales.q);
  t.k_scale = scales_of(scales.k_scale, p.scales.k);
  t.v_scale = scales_of(scales.v_scale, p.scales.v);
  t.score_shift = scales_of(scales.score_shift, Scaling::token);
  t.v_shift = scales_of(scales.v_shift, Scaling::channel);
}

}  // namespace tessera::python
