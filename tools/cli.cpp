// The application: global help, exit codes, and what every command shares.
#include <cstdio>
#include <exception>
#include <fstream>

#include "commands.h"
#include "numbers.h"

namespace tessera::tools {

int fail(const Status& status) {
  std::fprintf(stderr, "tessera: %s\n", status.text.c_str());
  return status.code == Code::invalid ? kBadInput : kCannot;
}

void add_threads(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "worker threads of a CPU; 0: all")
      ->transform(whole_number(0, kMaxThreads));
}

void ProblemOptions::add_to(CLI::App& command) {
  command.add_option("problems", lines, "problems, one argument each");
  command.add_option("--file", file, "a file of problems, one a line");
}

Result<std::vector<Problem>> ProblemOptions::read() const {
  std::vector<std::string> all = lines;
  if (!file.empty()) {
    std::ifstream from(file);
    if (!from) return Status::invalid(file + ": cannot be read");
    for (std::string line; std::getline(from, line);) {
      line = line.substr(0, line.find('#'));
      if (line.find_first_not_of(" \t\r") != std::string::npos) all.push_back(line);
    }
  }
  if (all.empty()) return Status::invalid("no problem given; name one or use --file");
  std::vector<Problem> problems;
  for (const std::string& line : all) {
    const Result<Problem> problem = parse_problem(line);
    if (!problem) return problem.status();
    if (Status s = validate(*problem); !s) return s;
    problems.push_back(*problem);
  }
  return problems;
}

void DeviceOptions::add_to(CLI::App& command) {
  command.add_option("--device", device,
                     "a device; `tessera info` lists them (default: the GPU if it can, else the "
                     "CPU; with --threads the CPU)");
  add_threads(command, threads);
}

Result<Device> device_for(const DeviceOptions& options, const Problem& problem) {
  if (options.device.empty() && options.threads == 0) {
    Result<Device> gpu = this_gpu();
    const Result<Plan> planned = gpu ? plan(problem, *gpu) : gpu.status();
    if (planned && runs_here(planned->kernel())) return gpu;
  }
  Result<Device> device = named_device(options.device.empty() ? "cpu" : options.device);
  if (!device || options.threads == 0) return device;
  if (is_gpu(device->arch)) {
    return Status::invalid("--threads = " + std::to_string(options.threads) +
                           ": counts the workers of a CPU; leave it out for device " +
                           device->name);
  }
  device->threads = options.threads;
  return device;
}

namespace {

constexpr const char* kFooter = R"(
A problem is one line of words; what is left out has its default:
  fwd|bwd  f32|bf16|f16|e4m3|i8  b=BATCH  h=HEADS[/HEADS_K]  q=SEQLEN_Q  k=SEQLEN_K
  d=HEAD_DIM[/HEAD_DIM_V]  packed=TOTAL_Q,TOTAL_K
  window=LEFT,RIGHT  causal  align=br|tl  chunk=N  sink_tokens=N  tree
  cache=full|after|before:SEQLEN_NEW  pages=NUM_PAGESxPAGE_SIZE[:i64][:skip]  rows=N
  prefixes=LEVELS  leftpad
  scale=X  softcap=X  alibi=h|bh  bias=DIMS[:DTYPE]  sink  dropout=P  deterministic
  batch_invariant  unaligned  o=DTYPE
  scales=Q/K/V (each tensor|head, of q token, of k block:KEYS, of k and v token,
    of v block:KEYS|channel|group:COLUMNS; none)
  v=DTYPE  kv=DTYPE  score_shift  v_shift  v_tiles  qv
  e.g.  "fwd bf16 b=2 h=32/8 q=4096 k=4096 d=128 causal"
        "fwd bf16 b=8 h=32/8 q=1 k=8192 d=128 cache=after pages=4096x16"
        "fwd e4m3 b=2 h=32/8 q=4096 k=4096 d=128 scales=token/block:64/channel v_tiles"

Exit codes: 0 success; 1 `check` found a wrong result; 2 arguments, problems or files that make no
sense; 3 this machine or build cannot do it.
)";

/// CLI11 only says that a command is missing; this names what was typed instead.
Status known_command(const CLI::App& app, const std::string& word) {
  if (word.empty() || word[0] == '-') return {};
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == word) return {};
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  return Status::invalid("command = '" + word + "': unknown; one of " + names);
}

}  // namespace

int run_cli(int argc, const char* const* argv) {
  CLI::App app("Tessera: exact attention, one tile at a time.", "tessera");
  app.set_version_flag("--version", std::string("tessera ") + version());
  app.require_subcommand(1);
  app.footer(kFooter);
  Context context;
  add_run(app, context);
  add_check(app, context);
  add_bench(app, context);
  add_plan(app, context);
  add_memory(app, context);
  add_cache(app, context);
  add_info(app, context);
  add_report(app, context);
  add_docs(app, context);
  if (Status s = known_command(app, argc > 1 ? argv[1] : ""); !s) return fail(s);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::fprintf(stderr, "tessera: %s (see tessera --help)\n", error.what());
    return kBadInput;
  } catch (const std::bad_alloc&) {
    return fail(Status::workspace("out of memory"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return kCannot;
  }
  return context.exit_code;
}

}  // namespace tessera::tools
