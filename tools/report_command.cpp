// tessera report: what a board or a CPU that nobody here has does with the kernels, in one table
// that can be sent: is it right, and how fast.
#include <cstdio>
#include <memory>

#include "bench.h"
#include "check/check.h"
#include "commands.h"
#include "report.h"

namespace tessera::tools {

namespace {

/// A feature, small enough to be judged and large enough to be timed.
struct Reported {
  const char* judged;
  const char* timed;
};

constexpr Reported kReported[] = {
    {"fwd bf16 b=2 h=4/2 q=200 k=333 d=64", "fwd bf16 b=4 h=16 q=4096 k=4096 d=64"},
    {"fwd bf16 b=2 h=4/2 q=200 k=333 d=64 causal", "fwd bf16 b=4 h=16 q=4096 k=4096 d=64 causal"},
    {"fwd bf16 b=2 h=4/2 q=200 k=333 d=128", "fwd bf16 b=4 h=16 q=4096 k=4096 d=128"},
    {"fwd f16 b=2 h=4/2 q=200 k=333 d=128 causal", "fwd f16 b=4 h=16 q=4096 k=4096 d=128 causal"},
    {"fwd bf16 h=4/2 q=200 k=333 d=256 causal", "fwd bf16 b=4 h=8 q=4096 k=4096 d=256 causal"},
    {"fwd bf16 h=2/1 q=100 k=170 d=512 causal", "fwd bf16 b=4 h=4 q=4096 k=4096 d=512 causal"},
    {"fwd bf16 h=4/2 q=200 k=333 d=128 window=100,0 sink",
     "fwd bf16 b=4 h=16 q=4096 k=4096 d=128 window=1024,0 sink"},
    {"fwd bf16 h=4/2 q=200 k=333 d=128 causal softcap=30",
     "fwd bf16 b=4 h=16 q=4096 k=4096 d=128 causal softcap=30"},
    {"fwd bf16 h=4/2 q=200 k=333 d=64 causal alibi=h dropout=0.1",
     "fwd bf16 b=4 h=16 q=4096 k=4096 d=64 causal alibi=h dropout=0.1"},
    {"fwd bf16 h=4/2 q=200 k=333 d=63", "fwd bf16 b=2 h=8 q=2048 k=2048 d=63"},
    {"fwd bf16 b=3 h=8/2 q=1 k=900 d=128 cache=after",
     "fwd bf16 b=16 h=32/8 q=1 k=8192 d=128 cache=after"},
    {"fwd bf16 b=3 h=8/2 q=1 k=900 d=256 cache=after pages=200x16",
     "fwd bf16 b=16 h=16/8 q=1 k=4096 d=256 cache=after pages=4100x16"},
    {"fwd bf16 b=3 h=8/2 q=1 k=900 d=128 kv=e4m3 scales=none/tensor/tensor cache=after",
     "fwd bf16 b=16 h=32/8 q=1 k=8192 d=128 kv=e4m3 scales=none/tensor/tensor cache=after"},
    {"bwd bf16 h=4/2 q=200 k=333 d=64 causal", "bwd bf16 b=2 h=16 q=4096 k=4096 d=64 causal"},
    {"bwd bf16 h=4/2 q=200 k=333 d=128", "bwd bf16 b=2 h=16 q=4096 k=4096 d=128"},
    {"bwd bf16 h=4/2 q=200 k=333 d=256 causal", "bwd bf16 b=2 h=8 q=4096 k=4096 d=256 causal"},
    {"bwd bf16 h=2/1 q=100 k=170 d=512 causal", "bwd bf16 b=2 h=4 q=4096 k=4096 d=512 causal"},
};

struct ReportOptions {
  std::string device = "gpu";
  BenchSettings how = {.seconds = 0.2};
  bool judge_only = false;
  bool json = false;
};

/// What one of them came to.
struct Line {
  std::string problem, kernel, result, time, flops, share, read, read_share;
  bool right = true;
};

/// What the device has no kernel for is no failure.
Line report_on(const Reported& one, const Device& device, const ReportOptions& options,
               std::uint64_t seed) {
  Line line;
  const Problem small = *parse_problem(one.judged);
  line.problem = options.judge_only ? one.judged : one.timed;
  if (const Result<Plan> planned = tessera::plan(small, device); !planned) {
    line.result = "no kernel";
    line.right = planned.status().code == Code::unsupported;
    return line;
  }
  const CheckResult result = tools::check(small, seed, device);
  line.kernel = result.kernel;
  line.right = result.status.ok() && result.pass();
  line.result = line.right ? "right" : !result.status ? result.status.text : result.summary();
  if (!line.right || options.judge_only) return line;
  const Result<Measurement> m = measure(*parse_problem(one.timed), device, options.how);
  if (!m) {
    line.right = false;
    line.result = m.status().text;
    return line;
  }
  line.kernel = m->kernel;
  line.time = seconds_text(m->seconds);
  line.flops = rate_text(m->flops / m->seconds);
  line.share = fixed_text(100.0 * m->share(), 1) + " %";
  line.read = rate_text(m->kv_bytes / m->seconds) + "B";
  line.read_share = fixed_text(100.0 * m->kv_bytes / m->seconds / m->peak_bytes, 1) + " %";
  return line;
}

Json to_json(const Line& line) {
  return {{"problem", line.problem},
          {"kernel", line.kernel},
          {"result", line.result},
          {"right", line.right},
          {"time", line.time},
          {"flops_per_second", line.flops},
          {"share_of_peak", line.share},
          {"kv_bytes_per_second", line.read},
          {"share_of_read", line.read_share}};
}

int run_report(const ReportOptions& options) {
  const Result<Device> device = named_device(options.device);
  if (!device) return fail(device.status());
  const Result<std::string> driver = driver_version();
  constexpr std::uint64_t kSeed = 1;  // the same everywhere, so that reports can be compared
  std::vector<std::string> columns = {"problem", "kernel", "result"};
  if (!options.judge_only) {
    columns.insert(columns.end(), {"time", "FLOP/s", "of peak", "K,V read/s", "of read"});
  }
  Table table(std::move(columns));
  Json lines = Json::array();
  int wrong = 0;
  std::int64_t done = 0;
  Progress progress("reporting");
  for (const Reported& one : kReported) {
    const Line line = report_on(one, *device, options, kSeed);
    wrong += line.right ? 0 : 1;
    lines.push_back(to_json(line));
    std::vector<std::string> cells = {line.problem, line.kernel, line.result};
    if (!options.judge_only) {
      cells.insert(cells.end(), {line.time, line.flops, line.share, line.read, line.read_share});
    }
    table.add(std::move(cells));
    progress.update(++done, static_cast<std::int64_t>(std::size(kReported)));
  }
  if (options.json) {
    const Json json = {{"version", version()},
                       {"device", device->name},
                       {"arch", to_string(device->arch)},
                       {"capability", device->capability},
                       {"multiprocessors", device->threads},
                       {"shared_bytes", device->l1_bytes},
                       {"l2_bytes", device->l2_bytes},
                       {"driver", driver ? *driver : ""},
                       {"lines", lines}};
    std::printf("%s\n", json.dump(2).c_str());
  } else {
    std::printf("tessera %s on %s (%s", version(), device->name.c_str(), to_string(device->arch));
    if (is_gpu(device->arch)) {
      std::printf(", %d.%d, %d multiprocessors, %s a block, L2 %s, driver of CUDA %s",
                  device->capability / 10, device->capability % 10, device->threads,
                  bytes_text(static_cast<double>(device->l1_bytes)).c_str(),
                  bytes_text(static_cast<double>(device->l2_bytes)).c_str(),
                  driver ? driver->c_str() : "?");
    }
    std::printf(")\n%s%d of %zu wrong\n", table.text().c_str(), wrong, std::size(kReported));
  }
  return wrong == 0 ? kSuccess : kCheckFailed;
}

}  // namespace

void add_report(CLI::App& app, Context& context) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* command = app.add_subcommand(
      "report",
      "What to send of a GPU that nobody here has: every kind of kernel, judged and timed");
  command->add_option("--device", options->device, "`tessera info` lists them")
      ->capture_default_str();
  command->add_flag("--judge-only", options->judge_only, "leave the times out");
  command->add_flag("--json", options->json, "print JSON");
  command->callback([options, &context] { context.exit_code = run_report(*options); });
}

}  // namespace tessera::tools
