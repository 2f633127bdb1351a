// The arithmetic behind `tessera memory`: what a model's KV cache and its attention need, and how
// many bytes attention moves between the memory and the fast memory of a processor. Pure functions
// of values. Amounts are doubles: exact below 2^53 bytes, and no shape can make them overflow.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tessera/status.hpp"

namespace tessera::tools {

/// Of any size here: far beyond any model, and small enough that no count overflows.
inline constexpr std::int64_t kLargestSize = std::int64_t{1} << 40;

/// The attention of one model: what its configuration file says.
struct ModelShape {
  std::string_view name;
  std::int64_t layers = 0;
  std::int64_t num_heads = 0;    ///< query heads
  std::int64_t num_heads_k = 0;  ///< key/value heads
  std::int64_t head_dim = 0;     ///< of queries and keys
  std::int64_t head_dim_v = 0;   ///< of values
  /// Layers whose queries see only the last `window` keys; their cache holds no more than these.
  std::int64_t window_layers = 0;
  std::int64_t window = 0;
  /// Latent attention (MLA): elements cached per token and layer instead of keys and values; 0:
  /// none. kRotatedColumns of them are rotated and keep the activations' type.
  std::int64_t latent = 0;
  bool causal = true;  ///< false: an encoder, which caches nothing
  std::string_view note;
  float softcap = 0.0F;  ///< of scores; 0: none
  bool sink = false;     ///< a number a head that takes part in the softmax
};

/// Of a latent row, in every model that has such.
inline constexpr std::int64_t kRotatedColumns = 64;

/// A GPU as its maker states it.
struct GpuFacts {
  std::string_view name;
  std::int64_t multiprocessors = 0;
  std::int64_t sram_bytes = 0;    ///< shared memory that one thread block can have
  double memory_bytes = 0.0;      ///< of the data sheet, in units of 10^9
  double bytes_per_second = 0.0;  ///< peak memory bandwidth of the data sheet
};

/// How a model is used.
struct Usage {
  std::int64_t seqlen = 0;
  std::int64_t batch = 1;
  std::int64_t element_bytes = 2;  ///< of activations, and of a cache by default: 4, 2 or 1
  std::int64_t cache_bytes = 0;    ///< of an element of the cache; 0: element_bytes
  bool token_scales = false;       ///< every key and every value has an fp32 scale, for each head
  std::int64_t group = 0;  ///< of latent rows: columns that share an fp32 scale; 0: no such scales
};

/// Bytes of keys and values kept for decoding.
struct KvCache {
  double per_token = 0.0;  ///< of one sequence, all layers, while every layer still keeps the token
  double per_sequence = 0.0;  ///< after `seqlen` tokens
  double total = 0.0;         ///< the whole batch
};

/// Bytes that attention needs beyond q, k, v and o.
struct AttentionMemory {
  double standard_layer = 0.0;  ///< one layer forward: the scores and the weights, both in memory
  double tiled_layer = 0.0;     ///< one layer forward: the log-sum-exp (fp32)
  double standard_saved = 0.0;  ///< training: the weights of all layers, kept for the backward pass
  double tiled_saved = 0.0;     ///< training: the log-sum-exp of all layers
};

/// Bytes moved between the memory and the SRAM, of one head of one sequence, no mask, seqlen_q =
/// seqlen_k. Caches in between are not modelled: this is the count of the I/O complexity argument,
/// Theta(N d + N^2) for the standard way, Theta(N^2 d^2 / M) tiled, in elements.
struct Traffic {
  double standard = 0.0;
  double tiled = 0.0;
  std::int64_t block = 0;  ///< rows of a tile: as many as the SRAM holds
};

enum class TrafficPass : std::uint8_t { forward, backward };

std::span<const ModelShape> known_models();
std::span<const GpuFacts> known_gpus();

/// By name; null if unknown.
const ModelShape* find_model(std::string_view name);
const GpuFacts* find_gpu(std::string_view name);
/// The same as a value. Errors: invalid (unknown; the text names those that are known).
Result<ModelShape> model_named(const std::string& name);

/// Says whether the numbers make sense; the text names the first that does not.
Status validate(const ModelShape& model);
Status validate(const Usage& usage);
/// Only latent rows have scales by group.
Status validate_group(const ModelShape& model, std::int64_t group);

/// Precondition of the following: both are valid.
KvCache kv_cache(const ModelShape& model, const Usage& usage);
AttentionMemory attention_memory(const ModelShape& model, const Usage& usage);

/// Sizes in elements and bytes; head_dim of queries, keys and values alike.
/// Errors: invalid (a size below 1, or an SRAM too small for one row of each tile).
Result<Traffic> head_traffic(TrafficPass pass, std::int64_t seqlen, std::int64_t head_dim,
                             std::int64_t element_bytes, std::int64_t sram_bytes);

}  // namespace tessera::tools
