// tessera bench: time, FLOP/s, share of the peak measured around it, and memory, for any list of
// problems.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "check/device_copy.h"
#include "check/inputs.h"
#include "commands.h"
#include "core/kept_pages.h"
#include "memory/decode_step.h"
#include "numbers.h"
#include "plan/plan.h"
#include "plan/shape.h"
#include "report.h"

namespace tessera::tools {

namespace {

struct BenchOptions {
  ProblemOptions what;
  DeviceOptions where;
  double seconds = 1.0;
  double peak_seconds = 0.05;
  bool cold = false;
  bool heads_outside = false;
  bool json = false;
  // A step of a model's decoding instead of problems:
  std::string model;  ///< empty: none
  std::string cache;  ///< its type; empty: that of the queries
  DecodeStep step;
};

/// What was measured for one problem.
struct Measurement {
  Problem problem;
  std::string kernel;
  int threads = 0;
  double seconds = 0.0;          ///< median of the runs
  double best_seconds = 0.0;     ///< fastest run: what remains where neighbours disturb the machine
  double enqueue_seconds = 0.0;  ///< median of a call of run(); GPU: the host's part
  int runs = 0;                  ///< GPU: batches of them
  double flops = 0.0;            ///< of one run
  double kv_bytes = 0.0;         ///< of K and V, read once
  double peak_flops = 0.0;       ///< mean of before and after
  double peak_bytes = 0.0;
  std::size_t workspace = 0;
  double three_step_bytes = 0.0;

  double share() const { return flops / seconds / peak_flops; }
  double best_share() const { return flops / best_seconds / peak_flops; }
};

/// A sequence without the pages that are skipped.
core::Sequence sequence_seen(const Problem& p, const Tensors& tensors, int batch) {
  core::Sequence sequence = given_sequence(p, tensors, batch);
  if (skips_pages(p)) {
    sequence.seqlen_k = core::keep_pages(given_cache(p, tensors).pages, sequence, [](auto...) {});
  }
  return sequence;
}

/// Visible (query, key) pairs of all sequences, heads not counted. A tree's bits count as set.
double visible_pairs(const Problem& p, const Tensors& tensors) {
  double pairs = 0.0;
  const bool alike = !p.packed && !p.cache;
  core::MaskRules rules = mask_rules_of(p, tensors);
  rules.tree = nullptr;
  for (int b = 0; b < (alike ? 1 : p.batch); ++b) {
    const core::Sequence sequence = sequence_seen(p, tensors, b);
    const core::SequenceMask mask = rules.of(sequences_of(p, tensors), sequence);
    for (int i = 0; i < sequence.seqlen_q; ++i) pairs += mask.runs_of({i, i + 1}).size();
  }
  return alike ? pairs * static_cast<double>(p.batch) : pairs;
}

/// Keys of all sequences.
double key_count(const Problem& p, const Tensors& tensors) {
  if (!p.cache) return static_cast<double>(p.rows_k());
  double keys = 0.0;
  for (int b = 0; b < p.batch; ++b) keys += sequence_seen(p, tensors, b).seqlen_k;
  return keys;
}

/// Multiply-adds count two. Forward: q.k, with qv qv.v, and p.v; backward: five products.
double flop_count(const Problem& p, const Tensors& tensors) {
  const double pairs = visible_pairs(p, tensors) * static_cast<double>(p.num_heads);
  const auto d = static_cast<double>(p.score_dim()), dv = static_cast<double>(p.head_dim_v);
  return 2.0 * pairs * (p.pass == Pass::forward ? d + dv : 3.0 * d + 2.0 * dv);
}

double three_step_bytes(const Problem& p) {
  const double scores = static_cast<double>(p.batch) * static_cast<double>(p.num_heads) *
                        static_cast<double>(p.seqlen_q) * static_cast<double>(p.seqlen_k);
  return 2.0 * scores * static_cast<double>(size_of(p.dtype));  // scores and probabilities
}

/// Inputs in several copies: with --cold each run finds its keys and values in memory, not in
/// caches.
std::vector<std::unique_ptr<RunMemory>> make_inputs(const Problem& problem, double kv_bytes,
                                                    const BenchOptions& options) {
  constexpr double kColdBytes = 256.0 * 1024 * 1024;
  const int copies =
      options.cold ? static_cast<int>(std::ceil(kColdBytes / std::max(kv_bytes, 1.0))) : 1;
  std::vector<std::unique_ptr<RunMemory>> inputs;
  for (int i = 0; i < std::clamp(copies, 1, 64); ++i) {
    const std::uint64_t seed = seed_with(Variation{}, static_cast<std::uint64_t>(i));
    const Heads heads = options.heads_outside ? Heads::outside : Heads::inside;
    inputs.push_back(std::make_unique<RunMemory>(problem, seed, heads));
    if (problem.pass == Pass::backward) {
      const auto rows = static_cast<std::size_t>(problem.rows_q() * problem.num_heads);
      const auto dv = static_cast<std::size_t>(problem.head_dim_v);
      // Any finite o and lse do for timing; correctness is check's business.
      inputs.back()->give_forward(std::vector<double>(rows * dv, 0.1),
                                  std::vector<double>(rows, 8.0));
    }
  }
  return inputs;
}

/// Seconds of each run, and of each call of run(): on a GPU those differ.
struct Times {
  std::vector<double> runs, calls;

  double median() const { return middle(runs); }
  double median_call() const { return middle(calls); }

 private:
  static double middle(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
};

using Inputs = std::vector<std::unique_ptr<RunMemory>>;

Result<Times> time_on_cpu(const Plan& plan, const Inputs& inputs, const Buffer& workspace,
                          const Executor& executor, const BenchOptions& options) {
  const Execution execution{&executor};
  Times times;
  const double start = clock_seconds();
  for (std::size_t i = 0; times.runs.size() < 3 || clock_seconds() - start < options.seconds; ++i) {
    const RunMemory& memory = *inputs[i % inputs.size()];
    const double begin = clock_seconds();
    const Status status =
        run(plan, memory.tensors(), workspace.data(), workspace.bytes(), execution);
    const double elapsed = clock_seconds() - begin;
    if (!status) return status;
    if (i > 0) times.runs.push_back(elapsed);  // the first run touches fresh pages
  }
  times.calls = times.runs;
  return times;
}

/// Runs are enqueued in batches of about five milliseconds, so that waiting for them costs nothing;
/// not so many that the driver's queue of 1024 launches fills and makes a call wait.
Result<Times> time_on_gpu(const Plan& plan, const Inputs& inputs, const Buffer& workspace,
                          const BenchOptions& options) {
  std::vector<DeviceCopy> copies;
  for (const auto& memory : inputs) {
    Result<DeviceCopy> copy = DeviceCopy::of(*memory, plan.device());
    if (!copy) return copy.status();
    copies.push_back(std::move(*copy));
  }
  Times times;
  std::size_t next = 0;
  const auto batch = [&](int count) -> Status {
    const double begin = clock_seconds();
    for (int i = 0; i < count; ++i, ++next) {
      const Status status = run(plan, copies[next % copies.size()].tensors(), workspace.data(),
                                workspace.bytes(), Execution{});
      if (!status) return status;
    }
    times.calls.push_back((clock_seconds() - begin) / count);
    if (Status s = synchronize(plan.device()); !s) return s;
    times.runs.push_back((clock_seconds() - begin) / count);
    return {};
  };
  constexpr double kBatchSeconds = 0.005;
  if (Status s = batch(1); !s) return s;  // loads the kernel
  if (Status s = batch(10); !s) return s;
  const int count = static_cast<int>(std::clamp(kBatchSeconds / times.runs.back(), 1.0, 200.0));
  times = {};
  const double start = clock_seconds();
  while (times.runs.size() < 3 || clock_seconds() - start < options.seconds) {
    if (Status s = batch(count); !s) return s;
  }
  return times;
}

Result<Measurement> measure(const Problem& problem, const Device& device,
                            const BenchOptions& options) {
  const Result<Plan> planned = plan(problem, device);
  if (!planned) return planned.status();
  const double kv_bytes =
      static_cast<double>(problem.rows_k() * problem.num_heads_k * key_and_value_bytes(problem));
  const auto inputs = make_inputs(problem, kv_bytes, options);
  const Result<Buffer> workspace = Buffer::allocate(device, planned->workspace_bytes());
  if (!workspace) return workspace.status();
  const bool on_gpu = is_gpu(device.arch);
  ThreadPool pool(on_gpu ? 1 : device.threads);
  const Executor executor = pool.executor();

  const auto before = measure_peaks(device, options.peak_seconds, &executor);
  if (!before) return before.status();
  const Result<Times> times = on_gpu ? time_on_gpu(*planned, inputs, *workspace, options)
                                     : time_on_cpu(*planned, inputs, *workspace, executor, options);
  if (!times) return times.status();
  const auto after = measure_peaks(device, options.peak_seconds, &executor);
  if (!after) return after.status();

  Measurement m;
  m.problem = problem;
  m.kernel = planned->kernel();
  m.threads = device.threads;
  m.seconds = times->median();
  m.best_seconds = *std::min_element(times->runs.begin(), times->runs.end());
  m.enqueue_seconds = times->median_call();
  m.runs = static_cast<int>(times->runs.size());
  m.flops = flop_count(problem, inputs[0]->tensors());
  m.kv_bytes = key_count(problem, inputs[0]->tensors()) *
               static_cast<double>(problem.num_heads_k * key_and_value_bytes(problem));
  const std::size_t bytes = planned->workspace_bytes();
  const bool bf16 = (problem.dtype == Dtype::bf16 || on_gpu) && before->bf16_flops > 0;
  m.peak_flops = bf16 ? (before->bf16_flops + after->bf16_flops) / 2
                      : (before->f32_flops + after->f32_flops) / 2;
  m.peak_bytes = (before->read_bytes + after->read_bytes) / 2;
  m.workspace = bytes;
  m.three_step_bytes = three_step_bytes(problem);
  return m;
}

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
  options.cold = true;  // between a layer and itself lie all others
  const Result<std::vector<StepLayers>> kinds = layers_of(*model, options.step);
  if (!kinds) return kinds.status();
  std::vector<MeasuredLayers> found;
  Progress progress("measuring");
  for (const StepLayers& kind : *kinds) {
    const Result<Device> device = device_for(options.where, kind.problem);
    if (!device) return device.status();
    const Result<Measurement> m = measure(kind.problem, *device, options);
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
    const Result<Measurement> m = measure((*problems)[i], *device, options);
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
  command->add_option("--seconds", options->seconds, "time spent on each problem")
      ->capture_default_str()
      ->check(number(0, 86400, true));
  command->add_flag("--cold", options->cold,
                    "rotate through copies of the inputs, so that caches do not hold K and V");
  command->add_flag("--heads-outside", options->heads_outside,
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
