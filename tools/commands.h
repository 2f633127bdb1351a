// The commands of `tessera`. Each adds itself to the CLI11 application and runs when chosen.
// main.cpp only calls run_cli, so that tests can call it too.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/tessera.hpp"

namespace tessera::tools {

/// Exit codes of the command; documented in --help.
enum ExitCode : int {
  kSuccess = 0,
  kCheckFailed = 1,  ///< `check` found a wrong result
  kBadInput = 2,     ///< arguments, problem strings or files that make no sense
  kCannot = 3,       ///< sensible, but this machine or build cannot do it
};

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
void add_info(CLI::App& app, Context& context);

/// The device of that name. An empty one: the first GPU if it has a kernel for the problem, else
/// the CPU.
Result<Device> device_for(const std::string& name, const Problem& problem);

/// What --help says of that name.
inline constexpr const char* kDeviceHelp =
    "a device; `tessera info` lists them (default: the GPU if it can, else the CPU)";

/// Prints "tessera: TEXT" to stderr and returns the exit code for that kind of failure.
int fail(const Status& status);

/// Parses the arguments and runs a command.
int run_cli(int argc, const char* const* argv);

}  // namespace tessera::tools
