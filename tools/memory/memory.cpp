// Counting bytes; see memory.h for what is counted.
#include "memory/memory.h"

#include <algorithm>
#include <string>

namespace tessera::tools {

namespace {

Status in_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return {};
  return Status::invalid(std::string(name) + " = " + std::to_string(value) + ": must lie in [" +
                         std::to_string(low) + ", " + std::to_string(high) + "]");
}

/// Bytes that one layer caches for one token, scales among them.
double cached_bytes(const ModelShape& model, const Usage& usage) {
  constexpr double kScaleBytes = 4.0;
  if (!model.causal) return 0.0;
  const auto bytes =
      static_cast<double>(usage.cache_bytes > 0 ? usage.cache_bytes : usage.element_bytes);
  if (model.latent == 0) {
    const auto heads = static_cast<double>(model.num_heads_k);
    return heads * static_cast<double>(model.head_dim + model.head_dim_v) * bytes +
           (usage.token_scales ? 2.0 * heads * kScaleBytes : 0.0);
  }
  const std::int64_t columns = std::max<std::int64_t>(model.latent - kRotatedColumns, 0);
  const std::int64_t groups = usage.group > 0 ? (columns + usage.group - 1) / usage.group : 0;
  return static_cast<double>(columns) * bytes +
         static_cast<double>((model.latent - columns) * usage.element_bytes) +
         kScaleBytes * static_cast<double>(groups + (usage.token_scales ? 1 : 0));
}

}  // namespace

Status validate(const ModelShape& model) {
  const Status checks[] = {
      in_range("layers", model.layers, 1, kLargestSize),
      in_range("num_heads", model.num_heads, 1, kLargestSize),
      in_range("num_heads_k", model.num_heads_k, 1, kLargestSize),
      in_range("head_dim", model.head_dim, 1, kLargestSize),
      in_range("head_dim_v", model.head_dim_v, 1, kLargestSize),
      in_range("window_layers", model.window_layers, 0, std::max<std::int64_t>(model.layers, 0)),
      in_range("window", model.window, model.window_layers > 0 ? 1 : 0, kLargestSize),
      in_range("latent", model.latent, 0, kLargestSize),
  };
  for (const Status& s : checks) {
    if (!s) return s;
  }
  if (model.num_heads % model.num_heads_k != 0) {
    return Status::invalid(
        "num_heads = " + std::to_string(model.num_heads) +
        ": must be a multiple of num_heads_k = " + std::to_string(model.num_heads_k));
  }
  return {};
}

Status validate(const Usage& usage) {
  if (Status s = in_range("seqlen", usage.seqlen, 0, kLargestSize); !s) return s;
  if (Status s = in_range("batch", usage.batch, 0, kLargestSize); !s) return s;
  if (usage.element_bytes != 1 && usage.element_bytes != 2 && usage.element_bytes != 4) {
    return Status::invalid("element_bytes = " + std::to_string(usage.element_bytes) +
                           ": must be 4 (f32), 2 (bf16, f16) or 1 (fp8)");
  }
  if (usage.cache_bytes != 0 && usage.cache_bytes != 1 && usage.cache_bytes != 2 &&
      usage.cache_bytes != 4) {
    return Status::invalid("cache_bytes = " + std::to_string(usage.cache_bytes) +
                           ": must be 4, 2 or 1, or 0 for element_bytes");
  }
  return in_range("group", usage.group, 0, kLargestSize);
}

Status validate_group(const ModelShape& model, std::int64_t group) {
  if (group == 0 || model.latent > 0) return {};
  return Status::invalid("model = '" + std::string(model.name) +
                         "': no latent rows, which scales " +
                         "by group = " + std::to_string(group) + " columns are for");
}

KvCache kv_cache(const ModelShape& model, const Usage& usage) {
  const double token_layer = cached_bytes(model, usage);
  const auto full_layers = static_cast<double>(model.layers - model.window_layers);
  const auto window_layers = static_cast<double>(model.window_layers);
  const auto seqlen = static_cast<double>(usage.seqlen);
  const double kept = std::min(seqlen, static_cast<double>(model.window));
  KvCache cache;
  cache.per_token = token_layer * static_cast<double>(model.layers);
  cache.per_sequence = token_layer * (full_layers * seqlen + window_layers * kept);
  cache.total = cache.per_sequence * static_cast<double>(usage.batch);
  return cache;
}

AttentionMemory attention_memory(const ModelShape& model, const Usage& usage) {
  const auto seqlen = static_cast<double>(usage.seqlen);
  const double rows =
      static_cast<double>(usage.batch) * static_cast<double>(model.num_heads) * seqlen;
  const double matrix = rows * seqlen * static_cast<double>(usage.element_bytes);
  const auto layers = static_cast<double>(model.layers);
  AttentionMemory memory;
  memory.standard_layer = 2.0 * matrix;
  memory.tiled_layer = rows * 4.0;
  memory.standard_saved = matrix * layers;
  memory.tiled_saved = rows * 4.0 * layers;
  return memory;
}

// Forward, standard: reads q and k, writes S; reads S, writes P; reads P and v, writes o.
//   tiled: one block of q and of o stays in the SRAM while all blocks of k and v pass by (4 tiles).
// Backward, standard: dv = P^T do; dP = do v^T; dS = P (dP - row sums); dq = dS k; dk = dS^T q,
// each
//   reading its operands and writing its result: 7 N^2 and 8 N d.
//   tiled: row sums of do * o first; then one block of k, v, dk and dv stays while all blocks of q,
//   do and dq (read and written) pass by with the log-sum-exp and the row sums (7 tiles).
Result<Traffic> head_traffic(TrafficPass pass, std::int64_t seqlen, std::int64_t head_dim,
                             std::int64_t element_bytes, std::int64_t sram_bytes) {
  const Status checks[] = {
      in_range("seqlen", seqlen, 1, kLargestSize),
      in_range("head_dim", head_dim, 1, kLargestSize),
      in_range("element_bytes", element_bytes, 1, 8),
      in_range("sram_bytes", sram_bytes, 1, kLargestSize),
  };
  for (const Status& s : checks) {
    if (!s) return s;
  }
  const bool forward = pass == TrafficPass::forward;
  const std::int64_t tiles = forward ? 4 : 7;
  const std::int64_t row_bytes = tiles * head_dim * element_bytes;
  if (sram_bytes < row_bytes) {
    return Status::invalid("sram_bytes = " + std::to_string(sram_bytes) + ": must be at least " +
                           std::to_string(row_bytes) + ", one row of each of the " +
                           std::to_string(tiles) + " tiles");
  }
  Traffic traffic;
  traffic.block = std::min(seqlen, sram_bytes / row_bytes);
  const std::int64_t blocks = (seqlen + traffic.block - 1) / traffic.block;
  const auto passes = static_cast<double>(blocks);
  const auto n = static_cast<double>(seqlen);
  const double tensor = n * static_cast<double>(head_dim) * static_cast<double>(element_bytes);
  const double matrix = n * n * static_cast<double>(element_bytes);
  const double floats = 4.0 * n;  // one fp32 a row
  if (forward) {
    traffic.standard = 4.0 * tensor + 4.0 * matrix;
    traffic.tiled = 2.0 * tensor + 2.0 * tensor * passes + floats;
  } else {
    traffic.standard = 8.0 * tensor + 7.0 * matrix;
    traffic.tiled = (2.0 * tensor + floats) + 4.0 * tensor + (4.0 * tensor + 2.0 * floats) * passes;
  }
  return traffic;
}

}  // namespace tessera::tools
