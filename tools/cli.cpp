// The application: global help, exit codes, and what every command shares.
#include <cstdio>
#include <exception>

#include "commands.h"

namespace tessera::tools {

int fail(const Status& status) {
  std::fprintf(stderr, "tessera: %s\n", status.text.c_str());
  return status.code == Code::invalid ? kBadInput : kCannot;
}

Result<Device> device_for(const std::string& name, const Problem& problem) {
  if (!name.empty()) return named_device(name);
  Result<Device> gpu = this_gpu();
  if (gpu && plan(problem, *gpu)) return gpu;
  return this_cpu();
}

namespace {

constexpr const char* kFooter = R"(
A problem is one line of words; what is left out has its default:
  fwd|bwd  f32|bf16|f16  b=BATCH  h=HEADS[/HEADS_K]  q=SEQLEN_Q  k=SEQLEN_K  d=HEAD_DIM[/HEAD_DIM_V]
  packed=TOTAL_Q,TOTAL_K  causal  window=LEFT,RIGHT  align=br|tl  scale=X  softcap=X  alibi=h|bh
  bias=DIMS[:DTYPE]  sink  dropout=P  deterministic  batch_invariant  unaligned
  e.g.  "fwd bf16 b=2 h=32/8 q=4096 k=4096 d=128 causal"

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
  add_info(app, context);
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
