#include "bench.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "check/device_copy.h"
#include "check/inputs.h"
#include "core/kept_pages.h"
#include "plan/plan.h"
#include "plan/shape.h"
#include "report.h"

namespace tessera::tools {

namespace {

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
                                                    const BenchSettings& settings) {
  constexpr double kColdBytes = 256.0 * 1024 * 1024;
  const int copies =
      settings.cold ? static_cast<int>(std::ceil(kColdBytes / std::max(kv_bytes, 1.0))) : 1;
  std::vector<std::unique_ptr<RunMemory>> inputs;
  for (int i = 0; i < std::clamp(copies, 1, 64); ++i) {
    const std::uint64_t seed = seed_with(Variation{}, static_cast<std::uint64_t>(i));
    const Heads heads = settings.heads_outside ? Heads::outside : Heads::inside;
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
                          const Executor& executor, const BenchSettings& settings) {
  const Execution execution{&executor};
  Times times;
  const double start = clock_seconds();
  for (std::size_t i = 0; times.runs.size() < 3 || clock_seconds() - start < settings.seconds;
       ++i) {
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
                          const BenchSettings& settings) {
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
  while (times.runs.size() < 3 || clock_seconds() - start < settings.seconds) {
    if (Status s = batch(count); !s) return s;
  }
  return times;
}

}  // namespace

Result<Measurement> measure(const Problem& problem, const Device& device,
                            const BenchSettings& settings) {
  const Result<Plan> planned = plan(problem, device);
  if (!planned) return planned.status();
  const double kv_bytes =
      static_cast<double>(problem.rows_k() * problem.num_heads_k * key_and_value_bytes(problem));
  const auto inputs = make_inputs(problem, kv_bytes, settings);
  const Result<Buffer> workspace = Buffer::allocate(device, planned->workspace_bytes());
  if (!workspace) return workspace.status();
  const bool on_gpu = is_gpu(device.arch);
  ThreadPool pool(on_gpu ? 1 : device.threads);
  const Executor executor = pool.executor();

  const auto before = measure_peaks(device, settings.peak_seconds, &executor);
  if (!before) return before.status();
  const Result<Times> times = on_gpu
                                  ? time_on_gpu(*planned, inputs, *workspace, settings)
                                  : time_on_cpu(*planned, inputs, *workspace, executor, settings);
  if (!times) return times.status();
  const auto after = measure_peaks(device, settings.peak_seconds, &executor);
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

}  // namespace tessera::tools
