// The commands of `tessera`. Each adds itself to the CLI11 application and runs when chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

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
void add_info(CLI::App& app, Context& context);

/// The device of that name. An empty one: the first GPU if it has a kernel for the problem, else
/// the CPU.
Result<Device> device_for(const std::string& name, const Problem& problem);

/// What --help says of that name.
inline constexpr const char* kDeviceHelp =
    "a device; `tessera info` lists them (default: the GPU if it can, else the CPU)";

/// Prints "tessera: TEXT" to stderr and returns the exit code for that kind of failure.
int fail(const Status& status);

}  // namespace tessera::tools
