// Problems of a step of decoding; see decode_step.h.
#include "memory/decode_step.h"

namespace tessera::tools {

Result<CacheType> parse_cache_type(const std::string& text) {
  constexpr std::string_view kScaled = "/token";
  CacheType type;
  type.token_scales = text.ends_with(kScaled);
  const std::string name =
      text.substr(0, text.size() - (type.token_scales ? kScaled.size() : std::size_t{0}));
  for (int i = 0; i < kDtypes; ++i) {
    type.dtype = static_cast<Dtype>(i);
    if (name == to_string(type.dtype) && (!type.token_scales || is_scaled(type.dtype))) return type;
  }
  return Status::invalid("cache = '" + text +
                         "': must be f32, bf16, f16, e4m3, i8, e4m3/token or i8/token");
}

namespace {

/// Of a latent row, in every model that has such.
constexpr std::int64_t kRotatedColumns = 64;

Status check(const ModelShape& model, const DecodeStep& step) {
  const std::string name = "model = '" + std::string(model.name) + "'";
  if (!model.causal) {
    return Status::invalid(name + ": an encoder, which has no steps of decoding");
  }
  if (model.latent > 0 && step.cache && is_scaled(step.cache->dtype)) {
    return Status::unsupported(name +
                               ": latent attention, which takes caches of 16 bits only; cache = '" +
                               to_string(step.cache->dtype) + "'");
  }
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
  if (step.cache && is_scaled(step.cache->dtype)) {
    p.dtype_kv = step.cache->dtype;
    p.scales.k = p.scales.v = step.cache->token_scales ? Scaling::token : Scaling::tensor;
  }
  return p;
}

}  // namespace

Result<std::vector<StepLayers>> layers_of(const ModelShape& model, const DecodeStep& step) {
  if (Status s = check(model, step); !s) return s;
  const Problem problem = problem_of(model, step);
  const Usage usage{.batch = step.batch,
                    .cache_bytes = size_of(problem.stored_k()),
                    .token_scales = step.cache && step.cache->token_scales};
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
