// tessera bench: any list of problems, or a step of a model, timed.
#include <cstdio>
#include <memory>
#include <vector>

#include "bench.h"
#include "commands.h"
#include "memory/decode_step.h"
#include "numbers.h"
#include "report.h"

namespace tessera::tools {

namespace {

struct BenchOptions {
  ProblemOptions what;
  DeviceOptions where;
  BenchSettings how;
  bool json = false;
  // A step of a model's decoding instead of problems:
  std::string model;  ///< empty: none
  std::string cache;  ///< its type; empty: that of the queries
  DecodeStep step;
};

Json to_json(const Measurement& m) {
  return {{"problem", to_string(m.problem)},
          {"kernel", m.kernel},
          {"threads", m.threads},
          {"seconds", m.seconds},
          {"best_seconds", m.best_seconds},
          {"enqueue_seconds", m.enqueue_seconds},
          {"runs", m.runs},
          {"flops_per_second", m.flops / m.seconds},
          {"peak_flops_per_second", m.peak_flops},
          {"share_of_peak", m.share()},
          {"best_share_of_peak", m.best_share()},
          {"kv_bytes_per_second", m.kv_bytes / m.seconds},
          {"peak_read_bytes_per_second", m.peak_bytes},
          {"workspace_bytes", m.workspace},
          {"three_step_bytes", m.three_step_bytes}};
}

/// Layers of a step that are alike, and what was measured of one of them. A step is all layers, one
/// after another; what a model does between them is not here.
struct MeasuredLayers {
  StepLayers what;
  Measurement measured;

  double seconds() const { return measured.seconds * static_cast<double>(what.layers); }
  /// At the speed of a plain read.
  double predicted() const { return what.bytes / measured.peak_bytes; }
};

Result<std::vector<MeasuredLayers>> measure_step(BenchOptions options) {
  const Result<ModelShape> model = model_named(options.model);
  if (!model) return model.status();
  if (!options.cache.empty()) {
    const Result<CacheType> type = parse_cache_type(options.cache);
    if (!type) return type.status();
    options.step.cache = *type;
  }
  options.how.cold = true;  // between a layer and itself lie all others
  const Result<std::vector<StepLayers>> kinds = layers_of(*model, options.step);
  if (!kinds) return kinds.status();
  std::vector<MeasuredLayers> found;
  Progress progress("measuring");
  for (const StepLayers& kind : *kinds) {
    const Result<Device> device = device_for(options.where, kind.problem);
    if (!device) return device.status();
    const Result<Measurement> m = measure(kind.problem, *device, options.how);
    if (!m) return m.status();
    found.push_back({kind, *m});
    progress.update(static_cast<std::int64_t>(found.size()),
                    static_cast<std::int64_t>(kinds->size()));
  }
  return found;
}

int run_step(const BenchOptions& options) {
  const Result<std::vector<MeasuredLayers>> kinds = measure_step(options);
  if (!kinds) return fail(kinds.status());
  Json json = Json::array();
  Table table({"layers", "problem of one", "kernel", "bytes", "predicted", "measured", "share"});
  double bytes = 0.0, predicted = 0.0, seconds = 0.0;
  const auto share = [](double part, double whole) {
    return fixed_text(100.0 * part / whole, 1) + " %";
  };
  for (const MeasuredLayers& kind : *kinds) {
    bytes += kind.what.bytes;
    predicted += kind.predicted();
    seconds += kind.seconds();
    table.add({std::to_string(kind.what.layers), to_string(kind.what.problem), kind.measured.kernel,
               bytes_text(kind.what.bytes), seconds_text(kind.predicted()),
               seconds_text(kind.seconds()), share(kind.predicted(), kind.seconds())});
    json.push_back({{"layers", kind.what.layers},
                    {"bytes", kind.what.bytes},
                    {"predicted_seconds", kind.predicted()},
                    {"seconds", kind.seconds()},
                    {"one", to_json(kind.measured)}});
  }
  if (options.json) {
    std::printf("%s\n", json.dump(2).c_str());
    return kSuccess;
  }
  std::fputs(table.text().c_str(), stdout);
  std::printf(
      "\nattention of a step of %s: %s, %s predicted at the speed of a plain read, %s "
      "measured (%s)\n",
      options.model.c_str(), bytes_text(bytes).c_str(), seconds_text(predicted).c_str(),
      seconds_text(seconds).c_str(), share(predicted, seconds).c_str());
  return kSuccess;
}

int run_bench(const BenchOptions& options) {
  if (!options.model.empty()) return run_step(options);
  const auto problems = options.what.read();
  if (!problems) return fail(problems.status());

  Json json = Json::array();
  Table table({"problem", "kernel", "time", "enqueue", "FLOP/s", "of peak", "best", "K,V read/s",
               "of read", "workspace", "three-step"});
  Progress progress("measuring");
  for (std::size_t i = 0; i < problems->size(); ++i) {
    const Result<Device> device = device_for(options.where, (*problems)[i]);
    if (!device) return fail(device.status());
    const Result<Measurement> m = measure((*problems)[i], *device, options.how);
    if (!m) return fail(m.status());
    json.push_back(to_json(*m));
    table.add({to_string(m->problem), m->kernel, seconds_text(m->seconds),
               seconds_text(m->enqueue_seconds), rate_text(m->flops / m->seconds),
               fixed_text(100.0 * m->share(), 1) + " %",
               fixed_text(100.0 * m->best_share(), 1) + " %",
               rate_text(m->kv_bytes / m->seconds) + "B",
               fixed_text(100.0 * m->kv_bytes / m->seconds / m->peak_bytes, 1) + " %",
               bytes_text(static_cast<double>(m->workspace)), bytes_text(m->three_step_bytes)});
    progress.update(static_cast<std::int64_t>(i + 1), static_cast<std::int64_t>(problems->size()));
  }
  if (options.json) {
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    std::fputs(table.text().c_str(), stdout);
  }
  return kSuccess;
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Time problems; share of the peak that is measured right before and after");
  options->what.add_to(*command);
  options->where.add_to(*command);
  command->add_option("--seconds", options->how.seconds, "time spent on each problem")
      ->capture_default_str()
      ->check(number(0, 86400, true));
  command->add_flag("--cold", options->how.cold,
                    "rotate through copies of the inputs, so that caches do not hold K and V");
  command->add_flag("--heads-outside", options->how.heads_outside,
                    "tensors in memory as (batch, heads, seqlen, head_dim), not (batch, seqlen, "
                    "heads, head_dim)");
  command->add_flag("--json", options->json, "print JSON");
  command
      ->add_option("--model", options->model,
                   "instead of problems: one step of decoding of a model that `tessera memory "
                   "--list` shows, layer for layer, cold")
      ->excludes("problems")
      ->excludes("--file");
  const auto add_size = [&](const char* name, std::int64_t& size, std::int64_t least,
                            const char* help) {
    command->add_option(name, size, help)
        ->capture_default_str()
        ->transform(whole_number(least, kLargestSize))
        ->needs("--model");
  };
  add_size("--batch", options->step.batch, 1, "... sequences");
  add_size("--seqlen", options->step.seqlen, 1, "... keys of each");
  add_size("--page-size", options->step.page_size, 0, "... slots of a page; 0: without pages");
  command
      ->add_option("--cache", options->cache,
                   "... type of the cache: bf16, e4m3, i8, the last two with /token if each head's "
                   "key and value has a scale, of latent rows with /group:128 if so many columns "
                   "have one")
      ->needs("--model");
  command->callback([options, &context] { context.exit_code = run_bench(*options); });
}

}  // namespace tessera::tools
