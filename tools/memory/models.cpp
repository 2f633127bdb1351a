// The models and GPUs that `tessera memory` knows by name. Models: the published configuration
// files (config.json; Gemma-2: sliding and global layers alternate, the first one slides). GPUs:
// the makers' data sheets; shared memory a block from the CUDA programming guide's table of compute
// capabilities 8.0, 8.9, 9.0 and 10.0.
#include <algorithm>
#include <array>

#include "memory/memory.h"

namespace tessera::tools {

namespace {

constexpr std::string_view kLatentNote =
    "latent attention: caches 512 compressed + 64 rotary elements a token and layer, shared by all "
    "heads, the 64 never of 8 bits; heads and dims are those of the expanded form";

// name, layers, heads, kv heads, head_dim, head_dim_v, window layers, window, latent, causal, note,
// softcap, sink
constexpr std::array kModels = {
    ModelShape{"llama-2-7b", 32, 32, 32, 128, 128, 0, 0, 0, true, ""},
    ModelShape{"llama-3-8b", 32, 32, 8, 128, 128, 0, 0, 0, true, ""},
    ModelShape{"llama-3-70b", 80, 64, 8, 128, 128, 0, 0, 0, true, ""},
    ModelShape{"llama-3.1-405b", 126, 128, 8, 128, 128, 0, 0, 0, true, ""},
    ModelShape{"mistral-7b", 32, 32, 8, 128, 128, 32, 4096, 0, true,
               "version 0.1; later versions have no window"},
    ModelShape{"mixtral-8x7b", 32, 32, 8, 128, 128, 0, 0, 0, true, ""},
    ModelShape{"gemma-2-9b", 42, 16, 8, 256, 256, 21, 4096, 0, true, "scores are capped at 50",
               50.0F},
    ModelShape{"qwen2.5-7b", 28, 28, 4, 128, 128, 0, 0, 0, true, ""},
    ModelShape{"qwen2.5-72b", 80, 64, 8, 128, 128, 0, 0, 0, true, ""},
    ModelShape{"gpt-oss-20b", 24, 64, 8, 64, 64, 12, 128, 0, true, "with a sink a head", 0.0F,
               true},
    ModelShape{"gpt-oss-120b", 36, 64, 8, 64, 64, 18, 128, 0, true, "with a sink a head", 0.0F,
               true},
    ModelShape{"deepseek-v3", 61, 128, 128, 192, 128, 0, 0, 576, true, kLatentNote},
    ModelShape{"gpt-2", 12, 12, 12, 64, 64, 0, 0, 0, true, ""},
    ModelShape{"gpt-2-xl", 48, 25, 25, 64, 64, 0, 0, 0, true, ""},
    ModelShape{"bert-base", 12, 12, 12, 64, 64, 0, 0, 0, false, "an encoder: no cache"},
    ModelShape{"minilm-l6", 6, 12, 12, 32, 32, 0, 0, 0, false, "an encoder: no cache"},
};

constexpr std::int64_t kKiB = 1024;

constexpr std::array kGpus = {
    GpuFacts{"a100-40gb", 108, 163 * kKiB, 40e9, 1.555e12},
    GpuFacts{"a100-80gb", 108, 163 * kKiB, 80e9, 2.039e12},  // SXM
    GpuFacts{"h100", 132, 227 * kKiB, 80e9, 3.35e12},        // SXM
    GpuFacts{"h200", 132, 227 * kKiB, 141e9, 4.8e12},
    GpuFacts{"b200", 148, 227 * kKiB, 180e9, 8.0e12},  // as in HGX B200
    GpuFacts{"rtx-4090", 128, 99 * kKiB, 24e9, 1.008e12},
};

template <class Table>
auto find(const Table& table, std::string_view name) -> decltype(table.data()) {
  const auto* const end = table.data() + table.size();
  const auto* const found =
      std::ranges::find(table.data(), end, name, [](const auto& row) { return row.name; });
  return found == end ? nullptr : found;
}

}  // namespace

std::span<const ModelShape> known_models() { return kModels; }
std::span<const GpuFacts> known_gpus() { return kGpus; }
const ModelShape* find_model(std::string_view name) { return find(kModels, name); }
const GpuFacts* find_gpu(std::string_view name) { return find(kGpus, name); }

Result<ModelShape> model_named(const std::string& name) {
  if (const ModelShape* const model = find_model(name)) return *model;
  std::string names;
  for (const ModelShape& known : kModels) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return Status::invalid("model = '" + name + "': unknown; known: " + names);
}

}  // namespace tessera::tools
