// tessera memory: what a model's KV cache and its attention need, standard against tiled, and how
// many bytes attention moves on a GPU with a given SRAM.
#include <cstdio>
#include <vector>

#include "commands.h"
#include "memory/decode_step.h"
#include "numbers.h"
#include "report.h"

namespace tessera::tools {

namespace {

constexpr const char* kModel = "llama-3-8b";
constexpr const char* kGpu = "h100";

struct MemoryOptions {
  std::string model, gpu;  ///< empty: kModel, kGpu
  Usage usage{.seqlen = 8192};
  std::string cache;  ///< its type, and "/token" for scales; empty: of --element-bytes
  // A shape of one's own replaces the named model.
  std::int64_t layers = 0, heads = 0, heads_k = 0, head_dim = 0, head_dim_v = 0, window = 0;
  std::int64_t sram_bytes = 0;
  bool list = false;
  bool json = false;
};

/// The model named, or the shape given by --layers, --heads, ...
Result<ModelShape> choose_model(const MemoryOptions& o) {
  if (o.layers > 0 || o.heads > 0 || o.heads_k > 0 || o.head_dim > 0 || o.head_dim_v > 0 ||
      o.window > 0) {
    if (!o.model.empty()) {
      return Status::invalid("model = '" + o.model +
                             "': has layers and heads of its own; give a model or a shape");
    }
    if (o.layers == 0 || o.heads == 0 || o.head_dim == 0) {
      return Status::invalid("a model of one's own needs --layers, --heads and --head-dim");
    }
    ModelShape shape;
    shape.name = "custom";
    shape.layers = o.layers;
    shape.num_heads = o.heads;
    shape.num_heads_k = o.heads_k > 0 ? o.heads_k : o.heads;
    shape.head_dim = o.head_dim;
    shape.head_dim_v = o.head_dim_v > 0 ? o.head_dim_v : o.head_dim;
    shape.window_layers = o.window > 0 ? o.layers : 0;
    shape.window = o.window;
    if (Status s = validate(shape); !s) return s;
    return shape;
  }
  return model_named(o.model.empty() ? kModel : o.model);
}

Result<std::int64_t> choose_sram(const MemoryOptions& o) {
  if (o.sram_bytes > 0 && !o.gpu.empty()) {
    return Status::invalid("gpu = '" + o.gpu + "': has SRAM of its own; give --gpu or --sram");
  }
  if (o.sram_bytes > 0) return o.sram_bytes;
  const GpuFacts* gpu = find_gpu(o.gpu.empty() ? kGpu : o.gpu);
  if (gpu != nullptr) return gpu->sram_bytes;
  std::string names;
  for (const GpuFacts& known : known_gpus()) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return Status::invalid("gpu = '" + o.gpu + "': unknown; known: " + names);
}

/// Everything that is printed.
struct Answer {
  ModelShape model;
  Usage usage;
  KvCache cache;
  AttentionMemory attention;
  std::int64_t sram_bytes = 0;
  Traffic forward, backward;
};

/// What --cache says.
Status read_cache(const std::string& text, Usage& usage) {
  if (text.empty()) return {};
  const Result<CacheType> type = parse_cache_type(text);
  if (!type) return type.status();
  usage.token_scales = type->token_scales;
  usage.group = type->group;
  usage.cache_bytes = size_of(type->dtype);
  return {};
}

Result<Answer> compute(MemoryOptions o) {
  if (Status s = read_cache(o.cache, o.usage); !s) return s;
  if (Status s = validate(o.usage); !s) return s;
  const Result<ModelShape> model = choose_model(o);
  if (!model) return model.status();
  if (Status s = validate_group(*model, o.usage.group); !s) return s;
  const Result<std::int64_t> sram = choose_sram(o);
  if (!sram) return sram.status();
  Answer a{*model, o.usage, kv_cache(*model, o.usage), attention_memory(*model, o.usage), *sram,
           {},     {}};
  for (const TrafficPass pass : {TrafficPass::forward, TrafficPass::backward}) {
    const Result<Traffic> traffic =
        head_traffic(pass, o.usage.seqlen, model->head_dim, o.usage.element_bytes, *sram);
    if (!traffic) return traffic.status();
    (pass == TrafficPass::forward ? a.forward : a.backward) = *traffic;
  }
  return a;
}

Json to_json(const Answer& a) {
  const auto traffic = [](const Traffic& t) {
    return Json{{"standard_bytes", t.standard}, {"tiled_bytes", t.tiled}, {"block_rows", t.block}};
  };
  return {
      {"model",
       {{"name", a.model.name},
        {"layers", a.model.layers},
        {"num_heads", a.model.num_heads},
        {"num_heads_k", a.model.num_heads_k},
        {"head_dim", a.model.head_dim},
        {"head_dim_v", a.model.head_dim_v},
        {"window_layers", a.model.window_layers},
        {"window", a.model.window}}},
      {"seqlen", a.usage.seqlen},
      {"batch", a.usage.batch},
      {"element_bytes", a.usage.element_bytes},
      {"cache_bytes", a.usage.cache_bytes > 0 ? a.usage.cache_bytes : a.usage.element_bytes},
      {"token_scales", a.usage.token_scales},
      {"group", a.usage.group},
      {"kv_cache",
       {{"per_token", a.cache.per_token},
        {"per_sequence", a.cache.per_sequence},
        {"total", a.cache.total}}},
      {"attention_memory",
       {{"standard_layer", a.attention.standard_layer},
        {"tiled_layer", a.attention.tiled_layer},
        {"standard_saved", a.attention.standard_saved},
        {"tiled_saved", a.attention.tiled_saved}}},
      {"sram_bytes", a.sram_bytes},
      {"traffic_per_head", {{"forward", traffic(a.forward)}, {"backward", traffic(a.backward)}}}};
}

std::string ratio_text(double standard, double tiled) {
  return tiled > 0.0 ? fixed_text(standard / tiled, 1) + " x" : "-";
}

void print(const Answer& a) {
  const ModelShape& m = a.model;
  std::printf("%s: %lld layers, %lld/%lld heads, head_dim %lld", std::string(m.name).c_str(),
              static_cast<long long>(m.layers), static_cast<long long>(m.num_heads),
              static_cast<long long>(m.num_heads_k), static_cast<long long>(m.head_dim));
  if (m.head_dim_v != m.head_dim) std::printf("/%lld", static_cast<long long>(m.head_dim_v));
  if (m.window_layers > 0) {
    std::printf(", %lld layers with a window of %lld", static_cast<long long>(m.window_layers),
                static_cast<long long>(m.window));
  }
  std::printf("\nseqlen %lld, batch %lld, %lld bytes an element\n",
              static_cast<long long>(a.usage.seqlen), static_cast<long long>(a.usage.batch),
              static_cast<long long>(a.usage.element_bytes));
  if (a.usage.cache_bytes > 0) {
    std::string scales;
    if (a.usage.token_scales) scales = ", and a scale for each head's key and value";
    if (a.usage.group > 0) {
      scales = ", and a scale for every " + std::to_string(a.usage.group) + " columns";
    }
    std::printf("cache: %lld bytes an element%s\n", static_cast<long long>(a.usage.cache_bytes),
                scales.c_str());
  }
  if (!m.note.empty()) std::printf("note: %s\n", std::string(m.note).c_str());

  std::printf("\nKV cache      %s a token, %s a sequence, %s the batch\n\n",
              bytes_text(a.cache.per_token).c_str(), bytes_text(a.cache.per_sequence).c_str(),
              bytes_text(a.cache.total).c_str());
  Table table({"attention beyond q, k, v, o", "standard", "tiled", "ratio"});
  const auto row = [&table](const std::string& name, double standard, double tiled) {
    table.add({name, bytes_text(standard), bytes_text(tiled), ratio_text(standard, tiled)});
  };
  row("forward, one layer", a.attention.standard_layer, a.attention.tiled_layer);
  row("kept for the backward, all layers", a.attention.standard_saved, a.attention.tiled_saved);
  row("moved, forward, one head", a.forward.standard, a.forward.tiled);
  row("moved, backward, one head", a.backward.standard, a.backward.tiled);
  std::fputs(table.text().c_str(), stdout);
  std::printf("\nmoved: between memory and %s of SRAM, tiles of %lld rows (docs/performance.md)\n",
              bytes_text(static_cast<double>(a.sram_bytes)).c_str(),
              static_cast<long long>(a.forward.block));
}

void print_known() {
  Table models({"model", "layers", "heads", "kv heads", "head_dim", "window"});
  for (const ModelShape& m : known_models()) {
    models.add({std::string(m.name), std::to_string(m.layers), std::to_string(m.num_heads),
                std::to_string(m.num_heads_k), std::to_string(m.head_dim),
                m.window_layers > 0 ? std::to_string(m.window) : "-"});
  }
  std::fputs(models.text().c_str(), stdout);
  Table gpus({"\ngpu", "SMs", "SRAM a block", "memory", "bandwidth"});
  for (const GpuFacts& g : known_gpus()) {
    gpus.add({std::string(g.name), std::to_string(g.multiprocessors),
              bytes_text(static_cast<double>(g.sram_bytes)),
              fixed_text(g.memory_bytes / 1e9, 0) + " GB", rate_text(g.bytes_per_second) + "B/s"});
  }
  std::fputs(gpus.text().c_str(), stdout);
}

int run_memory(const MemoryOptions& options) {
  if (options.list) {
    print_known();
    return kSuccess;
  }
  const Result<Answer> answer = compute(options);
  if (!answer) return fail(answer.status());
  if (options.json) {
    std::printf("%s\n", to_json(*answer).dump(2).c_str());
  } else {
    print(*answer);
  }
  return kSuccess;
}

}  // namespace

void add_memory(CLI::App& app, Context& context) {
  auto o = std::make_shared<MemoryOptions>();
  CLI::App* command = app.add_subcommand(
      "memory", "KV cache and attention memory of a model; bytes moved, standard against tiled");
  command->add_option("--model", o->model, "a model; --list shows them")->default_str(kModel);
  command->add_option("--gpu", o->gpu, "whose SRAM; --list shows them")->default_str(kGpu);
  const auto add_size = [command](const char* name, std::int64_t& size, const char* help,
                                  std::int64_t least = 1) {
    return command->add_option(name, size, help)->transform(whole_number(least, kLargestSize));
  };
  add_size("--seqlen", o->usage.seqlen, "tokens of a sequence")->capture_default_str();
  add_size("--batch", o->usage.batch, "sequences", 0)->capture_default_str();
  add_size("--element-bytes", o->usage.element_bytes, "4, 2 or 1")->capture_default_str();
  command->add_option(
      "--cache", o->cache,
      "type of the cache: f32, bf16, f16, e4m3, i8, the last two with /token if each head's key "
      "and value has a scale, of latent rows with /group:128 if so many columns have one; default: "
      "as --element-bytes says");
  add_size("--layers", o->layers, "a model of one's own: layers");
  add_size("--heads", o->heads, "... query heads");
  add_size("--heads-k", o->heads_k, "... key/value heads; default: --heads");
  add_size("--head-dim", o->head_dim, "... of queries and keys");
  add_size("--head-dim-v", o->head_dim_v, "... of values; default: --head-dim");
  add_size("--window", o->window, "... keys that a query sees, in every layer");
  add_size("--sram", o->sram_bytes, "bytes of SRAM, instead of a GPU's");
  command->add_flag("--list", o->list, "list the known models and GPUs");
  command->add_flag("--json", o->json, "print JSON");
  command->callback([o, &context] { context.exit_code = run_memory(*o); });
}

}  // namespace tessera::tools
