// Problems of a step of decoding; see decode_step.h.
#include "memory/decode_step.h"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace tessera::tools {

namespace {

/// What stands behind the type: false where that is nothing known.
bool parse_cache_scales(std::string_view text, CacheType& type) {
  constexpr std::string_view kGroup = "group:";
  type.token_scales = text == "token";
  if (type.token_scales) return true;
  if (!text.starts_with(kGroup)) return false;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data() + kGroup.size(), end, type.group);
  return read.ec == std::errc() && read.ptr == end && type.group > 0;
}

}  // namespace

Result<CacheType> parse_cache_type(const std::string& text) {
  const std::size_t slash = std::min(text.find('/'), text.size());
  const bool scales = slash < text.size();
  CacheType type;
  if (!scales || parse_cache_scales(std::string_view(text).substr(slash + 1), type)) {
    for (int i = 0; i < kDtypes; ++i) {
      type.dtype = static_cast<Dtype>(i);
      if (text.compare(0, slash, to_string(type.dtype)) != 0) continue;
      if (!scales || is_scaled(type.dtype)) return type;
    }
  }
  return Status::invalid("cache = '" + text +
                         "': must be f32, bf16, f16, e4m3 or i8, the last two with /token or "
                         "/group:COLUMNS if they have scales by token or by group");
}

namespace {

Status check(const ModelShape& model, const DecodeStep& step) {
  const std::string name = "model = '" + std::string(model.name) + "'";
  if (!model.causal) {
    return Status::invalid(name + ": an encoder, which has no steps of decoding");
  }
  if (Status s = validate_group(model, step.cache ? step.cache->group : 0); !s) return s;
  const struct {
    const char* name;
    std::int64_t value, low;
  } sizes[] = {
      {"batch", step.batch, 1}, {"seqlen", step.seqlen, 1}, {"page_size", step.page_size, 0}};
  for (const auto& size : sizes) {
    if (size.value >= size.low && size.value <= kLargestSize) continue;
    return Status::invalid(std::string(size.name) + " = " + std::to_string(size.value) +
                           ": must lie in [" + std::to_string(size.low) + ", " +
                           std::to_string(kLargestSize) + "]");
  }
  if (step.cache && !is_scaled(step.cache->dtype) && step.cache->dtype != step.dtype) {
    return Status::invalid("cache = '" + std::string(to_string(step.cache->dtype)) +
                           "': must be that of the queries, " + to_string(step.dtype) +
                           ", or e4m3 or i8");
  }
  return {};
}

Problem problem_of(const ModelShape& model, const DecodeStep& step) {
  Problem p;
  p.pass = Pass::forward;
  p.dtype = step.dtype;
  p.batch = step.batch;
  p.num_heads = model.num_heads;
  p.num_heads_k = model.num_heads_k;
  p.seqlen_q = 1;
  p.seqlen_k = step.seqlen;
  p.head_dim = model.head_dim;
  p.head_dim_v = model.head_dim_v;
  if (model.latent > 0) {
    // A row of the cache, of all heads: what is rotated, and the latent row.
    p.num_heads_k = 1;
    p.head_dim = kRotatedColumns;
    p.head_dim_v = model.latent - kRotatedColumns;
    p.qv = true;
  }
  p.softcap = model.softcap;
  p.sink = model.sink;
  CacheShape cache;
  cache.lengths = Lengths::full;
  if (step.page_size > 0) {
    const std::int64_t pages = (step.seqlen + step.page_size - 1) / step.page_size;
    cache.page_size = step.page_size;
    cache.num_pages = pages * step.batch;
    p.seqlen_k = pages * step.page_size;  // whole pages
  }
  p.cache = cache;
  if (!step.cache || !is_scaled(step.cache->dtype)) return p;
  p.scales.v = step.cache->token_scales ? Scaling::token : Scaling::tensor;
  if (model.latent > 0) {
    p.dtype_v = step.cache->dtype;
    if (step.cache->group > 0) {
      p.scales.v = Scaling::group;
      p.scales.block_v = step.cache->group;
    }
  } else {
    p.dtype_kv = step.cache->dtype;
    p.scales.k = p.scales.v;
  }
  return p;
}

}  // namespace

Result<std::vector<StepLayers>> layers_of(const ModelShape& model, const DecodeStep& step) {
  if (Status s = check(model, step); !s) return s;
  const Problem problem = problem_of(model, step);
  const Usage usage{.batch = step.batch,
                    .element_bytes = size_of(problem.dtype),
                    .cache_bytes = size_of(problem.stored_v()),
                    .token_scales = step.cache && step.cache->token_scales,
                    .group = step.cache ? step.cache->group : 0};
  std::vector<StepLayers> found;
  const auto add = [&](std::int64_t layers, std::int64_t window) {
    if (layers == 0) return;
    StepLayers kind = {problem, layers};
    ModelShape part = model;
    part.layers = layers;
    part.window_layers = 0;
    Usage seen = usage;
    seen.seqlen = problem.seqlen_k;
    if (window > 0 && window < problem.seqlen_k) {
      kind.problem.window_left = window - 1;
      kind.problem.window_right = 0;
      seen.seqlen = window;
    }
    kind.bytes = kv_cache(part, seen).total;
    found.push_back(kind);
  };
  add(model.layers - model.window_layers, 0);
  add(model.window_layers, model.window);
  return found;
}

}  // namespace tessera::tools
