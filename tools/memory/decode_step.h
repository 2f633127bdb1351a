// One step of decoding of a named model, as problems: what `tessera bench --model` measures.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "memory/memory.h"
#include "tessera/problem.hpp"

namespace tessera::tools {

/// The type of a cache's elements.
struct CacheType {
  Dtype dtype = Dtype::bf16;
  bool token_scales = false;  ///< of 8 bits: every key and every value has a scale, for each head
  std::int64_t group = 0;     ///< of latent rows of 8 bits: columns that share a scale; 0: others
};

/// "bf16", "e4m3", "i8/token", "e4m3/group:128" (FlashMLA's rows of 656 bytes), ...
/// Errors: invalid (no type, or "/token" and "/group:N" where it has no scales).
Result<CacheType> parse_cache_type(const std::string& text);

/// What a step is asked for.
struct DecodeStep {
  std::int64_t batch = 1;
  std::int64_t seqlen = 8192;  ///< keys of every sequence, the new one among them
  std::int64_t page_size = 0;  ///< slots of a page; 0: a row a sequence
  Dtype dtype = Dtype::bf16;   ///< of queries, and of a cache without a type of its own
  std::optional<CacheType> cache = std::nullopt;
};

/// Layers of a model that are alike.
struct StepLayers {
  Problem problem;  ///< of one of them: a query a sequence
  std::int64_t layers = 0;
  double bytes = 0.0;  ///< of all of them: keys, values and their scales that queries see, once
};

/// Layers that see all keys, and those that have a window. Sequences are as long as seqlen; scales
/// that are not by token or group are by tensor. Of latent rows, what is rotated has the queries'
/// type whatever the cache's.
/// Errors: invalid (an encoder, a seqlen, batch or page_size below 1, scales by group without
/// latent rows).
Result<std::vector<StepLayers>> layers_of(const ModelShape& model, const DecodeStep& step);

}  // namespace tessera::tools
