// The commands of `tessera`. Each adds itself to the CLI11 application and runs when chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli.h"
#include "tessera/tessera.hpp"

namespace tessera::tools {

using Json = nlohmann::ordered_json;

/// What every command gets: where the chosen one leaves its exit code.
struct Context {
  int exit_code = kSuccess;
};

void add_run(CLI::App& app, Context& context);
void add_check(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_plan(CLI::App& app, Context& context);
void add_memory(CLI::App& app, Context& context);
void add_cache(CLI::App& app, Context& context);
void add_info(CLI::App& app, Context& context);
void add_report(CLI::App& app, Context& context);
void add_docs(CLI::App& app, Context& context);

/// Problems, those of --file too, of commands that take several.
struct ProblemOptions {
  std::vector<std::string> lines;
  std::string file;

  /// With what --help says of them.
  void add_to(CLI::App& command);

  /// Those of the command line, then those of the file: one a line, '#' starts a comment. All are
  /// valid. Errors: invalid, also if there is none.
  Result<std::vector<Problem>> read() const;
};

/// --device and --threads, which most commands have.
struct DeviceOptions {
  std::string device;
  int threads = 0;  ///< 0: all

  /// With what --help says of them.
  void add_to(CLI::App& command);
};

/// --threads.
void add_threads(CLI::App& command, int& threads);

/// The device asked for. No name: the first GPU if this build has a kernel for the problem, else
/// the CPU; with a number of threads the CPU. Errors: also invalid (threads of a GPU).
Result<Device> device_for(const DeviceOptions& options, const Problem& problem);

/// Prints "tessera: TEXT" to stderr and returns the exit code for that kind of failure.
int fail(const Status& status);

}  // namespace tessera::tools
