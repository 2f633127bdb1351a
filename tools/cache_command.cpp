// tessera cache: GPU kernels that were compiled when they were needed, and kernels that will be.
#include <chrono>
#include <cstdio>
#include <ctime>

#include "commands.h"
#include "memory/decode_step.h"
#include "numbers.h"
#include "report.h"

namespace tessera::tools {

namespace {

struct CacheOptions {
  bool json = false;
};

struct WarmOptions {
  std::vector<std::string> problems;
  std::string device = "gpu", model;
  std::int64_t seqlen = 8192;
};

/// Of a moment, in UTC.
std::string date_text(std::int64_t seconds) {
  const std::time_t moment = seconds;
  std::tm utc{};
  char text[32] = {};
  if (gmtime_r(&moment, &utc) != nullptr) std::strftime(text, sizeof text, "%F %R", &utc);
  return text;
}

int run_list(const CacheOptions& options) {
  const Result<std::string> folder = code_cache_folder();
  if (!folder) return fail(folder.status());
  const Result<std::vector<CachedKernel>> kernels = cached_kernels();
  if (!kernels) return fail(kernels.status());
  if (options.json) {
    Json list = Json::array();
    for (const CachedKernel& one : *kernels) {
      list.push_back({{"kernel", one.name}, {"bytes", one.bytes}, {"last_use", one.last_use}});
    }
    std::printf("%s\n", Json{{"folder", *folder}, {"kernels", list}}.dump(2).c_str());
    return kSuccess;
  }
  Table table({"kernel", "size", "last use, UTC"});
  double bytes = 0.0;
  for (const CachedKernel& one : *kernels) {
    bytes += static_cast<double>(one.bytes);
    table.add({one.name, bytes_text(static_cast<double>(one.bytes)), date_text(one.last_use)});
  }
  if (!kernels->empty()) std::fputs(table.text().c_str(), stdout);
  std::printf("%s: %zu compiled kernels, %s\n", folder->c_str(), kernels->size(),
              bytes_text(bytes).c_str());
  return kSuccess;
}

int run_clear() {
  const Result<std::size_t> removed = clear_code_cache();
  if (!removed) return fail(removed.status());
  std::printf("%zu compiled kernels removed\n", *removed);
  return kSuccess;
}

/// A prompt, what training does of it, and a step of decoding.
Result<std::vector<Problem>> problems_of(const ModelShape& model, std::int64_t seqlen) {
  Problem p;
  p.pass = Pass::forward;
  p.dtype = Dtype::bf16;
  p.num_heads = model.num_heads;
  p.num_heads_k = model.num_heads_k;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.head_dim = model.head_dim;
  p.head_dim_v = model.head_dim_v;
  p.softcap = model.softcap;
  p.sink = model.sink;
  if (model.causal) p.window_right = 0;
  std::vector<Problem> found = {p};
  p.pass = Pass::backward;
  found.push_back(p);
  if (!model.causal) return found;
  DecodeStep step;
  step.seqlen = seqlen;
  const Result<std::vector<StepLayers>> layers = layers_of(model, step);
  if (!layers) return layers.status();
  for (const StepLayers& kind : *layers) found.push_back(kind.problem);
  return found;
}

Result<std::vector<Problem>> wanted(const WarmOptions& options) {
  std::vector<Problem> found;
  for (const std::string& line : options.problems) {
    const Result<Problem> problem = parse_problem(line);
    if (!problem) return problem.status();
    found.push_back(*problem);
  }
  if (options.model.empty() && found.empty()) {
    return Status::invalid("problems: none; give some, or a --model");
  }
  if (options.model.empty()) return found;
  const Result<ModelShape> model = model_named(options.model);
  if (!model) return model.status();
  const Result<std::vector<Problem>> more = problems_of(*model, options.seqlen);
  if (!more) return more.status();
  found.insert(found.end(), more->begin(), more->end());
  return found;
}

int run_warm(const WarmOptions& options) {
  const Result<Device> device = named_device(options.device);
  if (!device) return fail(device.status());
  const Result<std::vector<Problem>> problems = wanted(options);
  if (!problems) return fail(problems.status());
  std::size_t compiled = 0, all = 0;
  Progress progress("compiling");
  for (const Problem& problem : *problems) {
    const Result<Plan> planned = plan(problem, *device);
    if (!planned) return fail(planned.status());
    const Result<std::size_t> count = compile_ahead(*planned);
    if (!count) return fail(count.status());
    compiled += *count;
    progress.update(static_cast<std::int64_t>(++all), static_cast<std::int64_t>(problems->size()));
  }
  std::printf("%zu problems on %s: %zu kernels compiled, all others were there\n", all,
              device->name.c_str(), compiled);
  return kSuccess;
}

}  // namespace

void add_cache(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "cache", "GPU kernels that this build does not have: what was compiled, and is kept");
  command->footer(
      "A build without NVRTC has no GPU kernels. They are compiled when they are needed, where\n"
      "libnvrtc is found then, and kept in $TESSERA_CACHE_DIR, $XDG_CACHE_HOME/tessera or\n"
      "~/.cache/tessera, 256 MiB of them.");
  auto options = std::make_shared<CacheOptions>();
  CLI::App* list = command->add_subcommand("list", "the folder, and the kernels in it");
  list->add_flag("--json", options->json, "print JSON");
  list->callback([options, &context] { context.exit_code = run_list(*options); });
  command->add_subcommand("clear", "remove them")->callback([&context] {
    context.exit_code = run_clear();
  });
  auto warm = std::make_shared<WarmOptions>();
  CLI::App* ahead = command->add_subcommand(
      "warm", "compile what problems or a model need; takes no GPU if --device names one");
  ahead->add_option("problems", warm->problems, "problems, one argument each");
  ahead->add_option("--model", warm->model,
                    "the attention of a model that `tessera memory --list` shows: of a prompt, its "
                    "backward and a step of decoding, bf16");
  ahead->add_option("--seqlen", warm->seqlen, "... keys")
      ->capture_default_str()
      ->transform(whole_number(1, kLargestSize))
      ->needs("--model");
  ahead->add_option("--device", warm->device, "a GPU; `tessera info` lists them")
      ->capture_default_str();
  ahead->callback([warm, &context] { context.exit_code = run_warm(*warm); });
  command->require_subcommand(1);
}

}  // namespace tessera::tools
