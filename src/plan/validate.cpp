// validate: does a problem make sense, and do the tensors fit it? Every refusal names the argument,
// its value and what would be accepted.
#include <array>
#include <cmath>
#include <string>

#include "plan/checks.h"
#include "plan/plan.h"
#include "plan/text.h"

namespace tessera {

namespace {

/// Values that no enumerator has can arrive through casts.
Status check_enumerators(const Problem& p) {
  const struct {
    const char* name;
    int value, last;
  } values[] = {
      {"pass", static_cast<int>(p.pass), static_cast<int>(Pass::backward)},
      {"dtype", static_cast<int>(p.dtype), kDtypes - 1},
      {"dtype_o", static_cast<int>(p.stored_o()), kPlainDtypes - 1},
      {"dtype_kv", static_cast<int>(p.stored_k()), kDtypes - 1},
      {"dtype_v", static_cast<int>(p.stored_v()), kDtypes - 1},
      {"scales.q", static_cast<int>(p.scales.q), static_cast<int>(Scaling::group)},
      {"scales.k", static_cast<int>(p.scales.k), static_cast<int>(Scaling::group)},
      {"scales.v", static_cast<int>(p.scales.v), static_cast<int>(Scaling::group)},
      {"alignment", static_cast<int>(p.alignment), static_cast<int>(Alignment::top_left)},
      {"alibi", static_cast<int>(p.alibi), static_cast<int>(PerHead::batch_heads)},
      {"bias dtype", p.bias ? static_cast<int>(p.bias->dtype) : 0, kPlainDtypes - 1},
  };
  for (const auto& v : values) {
    if (Status s = check_range(v.name, v.value, 0, v.last); !s) return s;
  }
  return {};
}

Status check_sizes(const Problem& p) {
  const struct {
    const char* name;
    std::int64_t value, low, high;
  } ranges[] = {
      {"batch", p.batch, 0, kMaxBatch},
      {"num_heads", p.num_heads, 1, kMaxHeads},
      {"num_heads_k", p.num_heads_k, 1, kMaxHeads},
      {"seqlen_q", p.seqlen_q, 0, kMaxSeqlen},
      {"seqlen_k", p.seqlen_k, 0, kMaxSeqlen},
      {"head_dim", p.head_dim, 1, kMaxHeadDim},
      {"head_dim_v", p.head_dim_v, 1, kMaxHeadDim},
      {"window_left", p.window_left, -1, INT64_MAX},
      {"window_right", p.window_right, -1, INT64_MAX},
      {"chunk", p.chunk, 0, INT64_MAX},
      {"sink_tokens", p.sink_tokens, 0, INT64_MAX},
  };
  for (const auto& range : ranges) {
    if (Status s = check_range(range.name, range.value, range.low, range.high); !s) return s;
  }
  if (p.num_heads % p.num_heads_k != 0) {
    return Status::invalid(refused("num_heads_k", p.num_heads_k,
                                   "must divide num_heads = " + std::to_string(p.num_heads)));
  }
  constexpr std::int64_t kMaxRows = std::int64_t{1} << 36;
  if (p.seqlen_q * p.group() > kMaxRows) {
    return Status::invalid(refused("seqlen_q", p.seqlen_q,
                                   "times num_heads / num_heads_k = " + std::to_string(p.group()) +
                                       " must not exceed " + std::to_string(kMaxRows)));
  }
  return {};
}

Status check_totals(const Problem& p) {
  if (!p.packed) {
    if (p.total_q != 0) {
      return Status::invalid(refused("total_q", p.total_q, "must be 0 unless packed"));
    }
    if (p.total_k != 0) {
      return Status::invalid(refused("total_k", p.total_k, "must be 0 unless packed"));
    }
    return {};
  }
  // seqlen_q and seqlen_k are upper bounds of the sequences' lengths; cu_seqlens is int32.
  const auto check = [&p](const char* name, std::int64_t total, const char* longest_name,
                          std::int64_t longest) -> Status {
    const std::int64_t high = core::min<std::int64_t>(p.batch * longest, INT32_MAX);
    if (total >= 0 && total <= high) return {};
    return Status::invalid(refused(name, total,
                                   std::string("must lie in [0, batch * ") + longest_name +
                                       "] = [0, " + std::to_string(high) + "]"));
  };
  if (Status s = check("total_q", p.total_q, "seqlen_q", p.seqlen_q); !s) return s;
  if (p.cache) {
    return check_range("total_k", p.total_k, 0, 0);  // a cache's keys are not packed
  }
  return check("total_k", p.total_k, "seqlen_k", p.seqlen_k);
}

Status check_cache(const Problem& p) {
  if (!p.cache) return {};
  const CacheShape& cache = *p.cache;
  if (p.pass == Pass::backward) {
    return Status::invalid("cache: a backward has none; keys of a cache take no gradients");
  }
  return check_cache_shape(cache, cache.lengths == Lengths::before ? p.seqlen_k : 0);
}

Status check_mask(const Problem& p) {
  constexpr std::int64_t kBits = 64;
  if (p.tree && p.seqlen_q > kBits) {
    return Status::invalid(
        refused("seqlen_q", p.seqlen_q,
                "with tree a query has a bit for each: at most " + std::to_string(kBits)));
  }
  return {};
}

Status check_score(const Problem& p) {
  if (p.softmax_scale && !std::isfinite(*p.softmax_scale)) {
    return Status::invalid(refused("softmax_scale", *p.softmax_scale, "must be finite"));
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0.0F) {
    return Status::invalid(
        refused("softcap", p.softcap, "must be finite and positive, or 0 for no softcap"));
  }
  // Dropout decides by 16 random bits (S8): what rounds to 0 or 1 there cannot be honoured.
  constexpr float kStep = 1.0F / 65536.0F;
  if (p.dropout_p != 0.0F && !(p.dropout_p >= kStep && p.dropout_p <= 1.0F - kStep)) {
    return Status::invalid(
        refused("dropout_p", p.dropout_p, "must be 0, or lie in [2^-16, 1 - 2^-16]"));
  }
  if (p.bias && p.bias->dtype != Dtype::f32 && p.bias->dtype != p.dtype) {
    return Status::invalid(
        std::string("bias dtype = ") + to_string(p.bias->dtype) + ": must be f32" +
        (is_scaled(p.dtype) ? std::string()
                            : " or the problem's dtype, " + std::string(to_string(p.dtype))));
  }
  return {};
}

/// k and v have q's type, or are of 8 bits beside one that is not, or v alone is; v may be of 16
/// bits beside q and k of 8.
Status check_key_types(const Problem& p) {
  if (p.dtype_kv && *p.dtype_kv != p.dtype) {
    const std::string text = std::string("dtype_kv = ") + to_string(*p.dtype_kv) + ": ";
    if (!is_scaled(*p.dtype_kv) || is_scaled(p.dtype)) {
      return Status::invalid(text + "must be the problem's dtype, " + to_string(p.dtype) +
                             (is_scaled(p.dtype) ? "" : ", e4m3 or i8"));
    }
    if (p.pass == Pass::backward) return Status::invalid(text + "forward only");
    if (p.dtype_v && p.stored_v() != p.stored_k()) {
      return Status::invalid(std::string("dtype_v = ") + to_string(p.stored_v()) +
                             ": must be dtype_kv, " + to_string(p.stored_k()));
    }
    return {};
  }
  const Dtype v = p.stored_v();
  if (v == p.dtype) return {};
  const std::string text = std::string("dtype_v = ") + to_string(v) + ": ";
  const bool fits = is_scaled(p.dtype) ? v == Dtype::bf16 || v == Dtype::f16 : is_scaled(v);
  if (!fits) {
    return Status::invalid(text + "must be the problem's dtype, " + to_string(p.dtype) +
                           (is_scaled(p.dtype) ? ", bf16 or f16" : ", e4m3 or i8"));
  }
  if (is_scaled(v) && p.pass == Pass::backward) return Status::invalid(text + "forward only");
  return {};
}

/// One tensor's scaling must be among those that such a tensor may have, and its block there iff
/// its scaling is by blocks.
Status check_scaling(const char* name, Dtype dtype, Scaling scaling, std::int64_t block,
                     const Problem& p, std::initializer_list<Scaling> accepted) {
  const std::string field = std::string("scales.") + name;
  if (Status s = check_among(field, dtype, scaling, accepted); !s) return s;
  const std::string block_name = std::string("scales.block_") + name;
  if (scaling == Scaling::group) return check_range(block_name.c_str(), block, 1, p.head_dim_v);
  if (scaling != Scaling::block) return check_range(block_name.c_str(), block, 0, 0);
  if (p.cache) {
    return Status::invalid(field +
                           " = block: keys of a cache have scales by tensor, head or token");
  }
  return check_range(block_name.c_str(), block, 1, kMaxSeqlen);
}

/// Only what tensor cores multiply as 8 bits lies as they want it.
Status check_value_tiles(const Problem& p) {
  if (!p.v_tiles) return {};
  const std::string text = "v_tiles: ";
  if (p.stored_v() != Dtype::e4m3) {
    return Status::invalid(text + "v must be e4m3, it is " + to_string(p.stored_v()));
  }
  if (p.scales.v == Scaling::group) return Status::invalid(text + "takes no scales.v = group");
  if (p.cache) return Status::invalid(text + "a cache has its values in rows");
  constexpr std::int64_t kMost = 256;
  if (p.head_dim_v <= kMost) return {};
  return Status::invalid(refused("head_dim_v", p.head_dim_v, "v_tiles have up to 256 columns"));
}

/// A second query multiplies v as q does k.
Status check_second_query(const Problem& p) {
  if (!p.qv) return {};
  if (p.pass == Pass::backward) return Status::invalid("qv: forward only");
  if (!is_scaled(p.stored_k())) return {};
  return Status::invalid(
      std::string("qv: takes k of the problem's dtype, f32, bf16 or f16; it is ") +
      to_string(p.stored_k()));
}

/// Keys of a table that skips pages have no positions.
Status check_skipping(const Problem& p) {
  if (!p.cache || !p.cache->skips) return {};
  const struct {
    const char* name;
    bool there;
  } positional[] = {
      {"causal or window", p.window_left >= 0 || p.window_right >= 0},
      {"chunk", p.chunk > 0},
      {"sink_tokens", p.sink_tokens > 0},
      {"tree", p.tree},
      {"leftpad", p.cache->leftpad},
      {"alibi", p.alibi != PerHead::none},
      {"bias", p.bias.has_value()},
      {"dropout_p", p.dropout_p > 0.0F},
  };
  for (const auto& [name, there] : positional) {
    if (!there) continue;
    return Status::invalid(std::string("cache.skips: keys of pages that are listed have no "
                                       "positions, which ") +
                           name + " asks for");
  }
  return {};
}

/// Scales are there exactly where 8 bits need them (S14): without one nobody knows the values.
Status check_scales(const Problem& p) {
  const ScaleShape& s = p.scales;
  if (!p.scaled()) {
    if (s == ScaleShape{}) return {};
    return Status::invalid(std::string("scales: only tensors of 8 bits have them, dtype is ") +
                           to_string(p.dtype));
  }
  using enum Scaling;
  Status status = is_scaled(p.dtype) ? check_scaling("q", p.dtype, s.q, 0, p, {tensor, head, token})
                                     : check_scaling("q", p.dtype, s.q, 0, p, {none});
  if (!status) return status;
  status = is_scaled(p.stored_k())
               ? check_scaling("k", p.stored_k(), s.k, s.block_k, p, {tensor, head, token, block})
               : check_scaling("k", p.stored_k(), s.k, s.block_k, p, {none});
  if (!status) return status;
  if (s.score_shift && !is_scaled(p.stored_k())) {
    return Status::invalid(std::string("scales.score_shift: takes k of 8 bits; it is ") +
                           to_string(p.stored_k()));
  }
  if (is_scaled(p.stored_v())) {
    return is_scaled(p.dtype) ? check_scaling("v", p.stored_v(), s.v, s.block_v, p,
                                              {tensor, head, token, block, channel})
                              : check_scaling("v", p.stored_v(), s.v, s.block_v, p,
                                              {tensor, head, token, block, channel, group});
  }
  if (s.v == none && s.block_v == 0) return {};
  return Status::invalid(std::string("scales.v = ") + to_string(s.v) + ": must be none, v is " +
                         to_string(p.stored_v()));
}

/// o may be wider than the inputs or narrower, but not another kind of 16 bits.
Status check_output_type(const Problem& p) {
  const Dtype o = p.stored_o();
  if (is_scaled(p.dtype)) {
    if (is_scaled(p.stored_v()) || o == p.stored_v() || o == Dtype::f32) return {};
    return Status::invalid(std::string("dtype_o = ") + to_string(o) + ": must be f32 or v's, " +
                           to_string(p.stored_v()));
  }
  if (o == p.dtype || o == Dtype::f32 || p.dtype == Dtype::f32) return {};
  return Status::invalid(std::string("dtype_o = ") + to_string(o) +
                         ": must be f32 or the problem's dtype, " + to_string(p.dtype));
}

Status check_products(const Problem& p) {
  const std::int64_t dim = core::max(p.head_dim, p.head_dim_v);
  if (!fits_offsets({p.batch, core::max(p.seqlen_q, p.seqlen_k), p.num_heads, dim})) {
    return Status::invalid("batch * seqlen * num_heads * head_dim: " + std::to_string(p.batch) +
                           " * " + std::to_string(core::max(p.seqlen_q, p.seqlen_k)) + " * " +
                           std::to_string(p.num_heads) + " * " + std::to_string(dim) +
                           " elements do not fit 64-bit offsets");
  }
  return {};
}

/// Scales of k or v: those by token or group lie as the tensor, of shape `rows`.
Status check_key_scales(const char* name, const ConstScales& scales, Scaling by, const Problem& p,
                        const Shape& rows, bool used) {
  const bool token = by == Scaling::token || by == Scaling::group;
  const Scaling other = token ? Scaling::tensor : by;
  if (Status e = check_numbers(name, scales, other, p, used); !e) return e;
  if (!token || scales.data == nullptr) return {};
  const ConstTensor tensor = {scales.data, scales.stride_batch, scales.stride_seqlen,
                              scales.stride_head};
  return check_tensor(name, tensor, rows, p.packed_k());
}

/// rows: of k.
Status check_scale_tensors(const Problem& p, const Tensors& t, const Shape& rows) {
  const ScaleShape& s = p.scales;
  const bool queries = p.rows_q() > 0, keys = queries && p.rows_k() > 0;
  const auto iff = [](bool there, Scaling scaling) { return there ? scaling : Scaling::none; };
  if (Status e = check_numbers("q_scale", t.q_scale, s.q, p, keys); !e) return e;
  if (Status e = check_key_scales("k_scale", t.k_scale, s.k, p, rows, keys); !e) return e;
  if (Status e = check_key_scales("v_scale", t.v_scale, s.v, p, rows, keys); !e) return e;
  if (Status e =
          check_numbers("score_shift", t.score_shift, iff(s.score_shift, Scaling::token), p, keys);
      !e) {
    return e;
  }
  return check_numbers("v_shift", t.v_shift, iff(s.v_shift, Scaling::channel), p, keys);
}

/// ConstBias or Bias; only stored dimensions count.
template <class AnyBias>
std::array<Axis, 4> axes_of(const AnyBias& bias, const Problem& p) {
  const auto size = [](bool stored, std::int64_t full) { return stored ? full : 1; };
  return {{{".stride_batch", bias.stride_batch, size(p.bias->batch, p.batch)},
           {".stride_head", bias.stride_head, size(p.bias->heads, p.num_heads)},
           {".stride_query", bias.stride_query, size(p.bias->queries, p.seqlen_q)},
           {".stride_key", bias.stride_key, size(p.bias->keys, p.seqlen_k)}}};
}

/// Whether the arrays about a cache are there exactly where the problem has them.
Status check_cache_tensors(const Problem& p, const CacheTensors& t) {
  const CacheShape shape = p.cache.value_or(CacheShape{.lengths = Lengths::full});
  const bool any = p.batch > 0;
  const struct {
    const char* name;
    const void* data;
    bool wanted;
    const char* why;
    const char* why_not;
  } arrays[] = {
      {"cache.seqlens", t.seqlens, shape.lengths != Lengths::full, "the cache has lengths",
       "the problem has no lengths; set Problem::cache"},
      {"cache.cu_seqlens_new", t.cu_seqlens_new, shape.lengths == Lengths::before && p.packed,
       "packed queries and lengths before the append need batch + 1 offsets of new keys",
       "only packed queries beside lengths before the append take it"},
      {"cache.page_table", t.page_table, shape.paged() && p.seqlen_k > 0, "the cache has pages",
       "the cache has no pages; set CacheShape::page_size"},
      {"cache.index", t.index, shape.rows > 0, "CacheShape::rows says that it picks rows",
       "CacheShape::rows is 0"},
      {"cache.leftpad", t.leftpad, shape.leftpad, "CacheShape::leftpad says that it is there",
       "CacheShape::leftpad is false"},
  };
  for (const auto& array : arrays) {
    if (array.wanted && any && array.data == nullptr) return missing(array.name, array.why);
    if (!array.wanted && array.data != nullptr && !(shape.paged() && p.seqlen_k == 0)) {
      return Status::invalid(std::string(array.name) + " is given, but " + array.why_not);
    }
  }
  if (!shape.paged()) return {};
  const Axis rows[] = {
      {".stride_page_table", t.stride_page_table, shape.rows > 0 ? shape.rows : p.batch}};
  return check_strides("cache", rows);
}

/// A sequence's row, slots and pages, where they can be read.
Status check_cached_sequence(const Problem& p, const Tensors& tensors, int batch) {
  const CacheShape& shape = *p.cache;
  const CacheTensors& t = tensors.cache;
  const core::Cache cache = given_cache(p, tensors);
  const std::int64_t length = shape.lengths == Lengths::full ? p.seqlen_k : t.seqlens[batch];
  if (length < 0) return {};  // a no-op
  std::int64_t more = shape.seqlen_new;
  if (const std::int32_t* const cu = cache.cu_seqlens_new) {
    more = std::int64_t{cu[batch + 1]} - cu[batch];
    if (more < 0 || more > shape.seqlen_new) {
      return Status::invalid(refused(element("cache.cu_seqlens_new", batch + 1).c_str(),
                                     cu[batch + 1],
                                     "new keys would be " + std::to_string(more) +
                                         "; they must lie in [0, seqlen_new] = [0, " +
                                         std::to_string(shape.seqlen_new) + "]"));
    }
  }
  if (length + more == 0) return {};  // another
  if (length + more > p.seqlen_k) {
    return Status::invalid(refused(element("cache.seqlens", batch).c_str(), length,
                                   (more > 0 ? "and " + std::to_string(more) + " new keys " : "") +
                                       "must not exceed seqlen_k = " + std::to_string(p.seqlen_k)));
  }
  if (Status s = check_row(cache, batch); !s) return s;
  if (cache.leftpad != nullptr && cache.leftpad[batch] < 0) {
    return Status::invalid(
        refused(element("cache.leftpad", batch).c_str(), cache.leftpad[batch], "must be >= 0"));
  }
  if (!shape.paged()) return {};
  const core::Sequence sequence = given_sequence(p, tensors, batch);
  if (sequence.seqlen_k == 0) return {};  // then its first slot may be anywhere
  const int first = sequence.first_k / cache.pages.size;
  const int last = core::ceil_div(sequence.first_k + sequence.seqlen_k, cache.pages.size);
  for (int column = first; column < last; ++column) {
    if (shape.skips && cache.pages.at(sequence.entry_k, column) < 0) continue;
    if (Status s = check_page(cache.pages, sequence.entry_k, column); !s) return s;
  }
  return {};
}

Status check_cached_sequences(const Problem& p, const Tensors& t) {
  Status status;
  for (int b = 0; status && b < p.batch; ++b) status = check_cached_sequence(p, t, b);
  return status;
}

Status check_extras(const Problem& p, const Tensors& t) {
  const bool any_score = p.rows_q() > 0 && p.rows_k() > 0;
  if (any_score) {
    if (p.bias) {
      if (t.bias.data == nullptr) return missing("bias.data", "the problem has a bias");
      if (Status s = check_strides("bias", axes_of(t.bias, p)); !s) return s;
    }
    if (p.alibi != PerHead::none && t.alibi_slopes == nullptr) {
      return missing("alibi_slopes", "the problem has ALiBi");
    }
  }
  if (p.sink && p.rows_q() > 0 && t.sink == nullptr)
    return missing("sink", "the problem has a sink");
  if (!p.bias && t.bias.data != nullptr) {
    return Status::invalid("bias.data is given, but the problem has no bias; set Problem::bias");
  }
  if (p.alibi == PerHead::none && t.alibi_slopes != nullptr) {
    return Status::invalid("alibi_slopes is given, but the problem has none; set Problem::alibi");
  }
  if (!p.sink && t.sink != nullptr) {
    return Status::invalid("sink is given, but the problem has none; set Problem::sink");
  }
  if (p.tree && p.rows_q() > 0 && t.tree_mask == nullptr) {
    return missing("tree_mask", "the problem has a tree");
  }
  if (!p.tree && t.tree_mask != nullptr) {
    return Status::invalid("tree_mask is given, but the problem has none; set Problem::tree");
  }
  if (!p.packed && (t.cu_seqlens_q != nullptr || t.cu_seqlens_k != nullptr)) {
    return Status::invalid("cu_seqlens is given, but the problem is dense; set Problem::packed");
  }
  return {};
}

Status check_backward(const Problem& p, const Tensors& t, const Shape& q, const Shape& k,
                      const Shape& v, const Shape& o) {
  if (Status s = check_tensor("dout", t.dout, o, p.packed); !s) return s;
  if (Status s = check_output("dq", t.dq, q, p.packed); !s) return s;
  if (Status s = check_output("dk", t.dk, k, p.packed); !s) return s;
  if (Status s = check_output("dv", t.dv, v, p.packed); !s) return s;
  if (p.rows_q() > 0 && t.saved_softmax_lse == nullptr) {
    return missing("softmax_lse", "the backward reads the forward's softmax_lse");
  }
  if (!p.bias && t.dbias.data != nullptr) {
    return Status::invalid("dbias.data is given, but the problem has no bias; set Problem::bias");
  }
  if (p.bias && t.dbias.data != nullptr) {
    if (Status s = check_strides("dbias", axes_of(t.dbias, p)); !s) return s;
    if (Status s = check_apart("dbias", axes_of(t.dbias, p), 1); !s) return s;
  }
  if (!p.sink && t.dsink != nullptr) {
    return Status::invalid("dsink is given, but the problem has no sink; set Problem::sink");
  }
  return {};
}

}  // namespace

Status validate(const Problem& problem) {
  if (Status s = check_enumerators(problem); !s) return s;
  if (Status s = check_sizes(problem); !s) return s;
  if (Status s = check_totals(problem); !s) return s;
  if (Status s = check_cache(problem); !s) return s;
  if (Status s = check_mask(problem); !s) return s;
  if (Status s = check_score(problem); !s) return s;
  if (Status s = check_key_types(problem); !s) return s;
  if (Status s = check_value_tiles(problem); !s) return s;
  if (Status s = check_second_query(problem); !s) return s;
  if (Status s = check_skipping(problem); !s) return s;
  if (Status s = check_scales(problem); !s) return s;
  if (Status s = check_output_type(problem); !s) return s;
  return check_products(problem);
}

Status validate(const Problem& problem, const Tensors& t, Memory memory) {
  const Problem& p = problem;
  const std::int64_t rows_q = p.packed ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = p.packed ? p.total_k : p.seqlen_k;
  const Shape q{p.batch, rows_q, p.num_heads, p.head_dim};
  Shape k{p.batch, rows_k, p.num_heads_k, p.head_dim};
  if (p.cache && p.cache->paged()) {
    k.batch = p.cache->num_pages;
    k.seqlen = p.cache->page_size;
  } else if (p.cache) {
    k.batch = p.cache->rows > 0 ? p.cache->rows : p.batch;
    k.seqlen = p.seqlen_k;
  }
  const Shape v{k.batch, k.seqlen, p.num_heads_k, p.head_dim_v};
  const Shape o{p.batch, rows_q, p.num_heads, p.head_dim_v};
  if (Status s = check_tensor("q", t.q, q, p.packed); !s) return s;
  if (p.qv) {
    if (Status s = check_tensor("qv", t.qv, o, p.packed); !s) return s;
  } else if (t.qv.data != nullptr) {
    return Status::invalid("qv.data is given, but the problem has none; set Problem::qv");
  }
  if (Status s = check_tensor("k", t.k, k, p.packed_k()); !s) return s;
  // Tiles have no rows, and thus no stride between them.
  ConstTensor values = t.v;
  if (p.v_tiles) values.stride_seqlen = 0;
  if (Status s = check_tensor("v", values, v, p.packed_k()); !s) return s;
  if (Status s = p.pass == Pass::forward ? check_output("o", t.o, o, p.packed)
                                         : check_tensor("o", t.saved_o, o, p.packed);
      !s) {
    return s;
  }
  if (Status s = check_extras(p, t); !s) return s;
  if (Status s = check_scale_tensors(p, t, k); !s) return s;
  if (Status s = check_cache_tensors(p, t.cache); !s) return s;
  if (p.cache && t.cu_seqlens_k != nullptr) {
    return Status::invalid("cu_seqlens_k is given, but a cache's keys are not packed");
  }
  if (p.packed && memory == Memory::device) {
    if (t.cu_seqlens_q == nullptr) return missing("cu_seqlens_q", kNoOffsets);
    if (!p.cache && t.cu_seqlens_k == nullptr) return missing("cu_seqlens_k", kNoOffsets);
  } else if (p.packed) {
    if (Status s = check_cu_seqlens("cu_seqlens_q", t.cu_seqlens_q, p.batch, "total_q", p.total_q,
                                    "seqlen_q", p.seqlen_q);
        !s) {
      return s;
    }
    if (!p.cache) {
      if (Status s = check_cu_seqlens("cu_seqlens_k", t.cu_seqlens_k, p.batch, "total_k", p.total_k,
                                      "seqlen_k", p.seqlen_k);
          !s) {
        return s;
      }
    }
  }
  if (p.cache && memory == Memory::host) return check_cached_sequences(p, t);
  return p.pass == Pass::backward ? check_backward(p, t, q, k, v, o) : Status{};
}

Status validate(const PartialResults& r, const PartialTensors& t) {
  const struct {
    const char* name;
    std::int64_t value, low, high;
  } ranges[] = {
      {"dtype", static_cast<int>(r.dtype), 0, kPlainDtypes - 1},
      {"dtype_o", static_cast<int>(r.dtype_o), 0, kPlainDtypes - 1},
      {"num_splits", r.num_splits, 1, kMaxSplits},
      {"batch", r.batch, 0, kMaxBatch},
      {"seqlen_q", r.seqlen_q, 0, INT32_MAX},
      {"num_heads", r.num_heads, 1, kMaxHeads},
      {"head_dim_v", r.head_dim_v, 1, kMaxHeadDim},
  };
  for (const auto& range : ranges) {
    if (Status s = check_range(range.name, range.value, range.low, range.high); !s) return s;
  }
  if (!fits_offsets({r.num_splits, r.batch, r.seqlen_q, r.num_heads, r.head_dim_v})) {
    return Status::invalid(
        "num_splits * batch * seqlen_q * num_heads * head_dim_v: elements do not "
        "fit 64-bit offsets");
  }
  const Shape o{r.batch, r.seqlen_q, r.num_heads, r.head_dim_v};
  if (r.rows() == 0) return {};
  const auto check_parts = [&](const char* name, const auto& parts) -> Status {
    if (parts.data == nullptr) return missing(name, "must point to the tensor");
    const Axis axes[] = {{".stride_split", parts.stride_split, r.num_splits},
                         {".stride_batch", parts.stride_batch, r.batch},
                         {".stride_seqlen", parts.stride_seqlen, r.seqlen_q},
                         {".stride_head", parts.stride_head, r.num_heads}};
    return check_strides(name, axes);
  };
  if (Status s = check_parts("o_parts", t.o_parts); !s) return s;
  if (Status s = check_parts("lse_parts", t.lse_parts); !s) return s;
  if (Status s = check_output("o", t.o, o, false); !s) return s;
  if (t.softmax_lse.data == nullptr) return {};
  const Lse& lse = t.softmax_lse;
  return check_output("softmax_lse",
                      {lse.data, lse.stride_batch, lse.stride_seqlen, lse.stride_head},
                      {r.batch, r.seqlen_q, r.num_heads, 1}, false);
}

}  // namespace tessera
