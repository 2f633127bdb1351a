// The command as a function: main.cpp only calls it, so that tests can call it too.
#pragma once

namespace tessera::tools {

/// Exit codes of the command; documented in --help.
enum ExitCode : int {
  kSuccess = 0,
  kCheckFailed = 1,  ///< `check` found a wrong result
  kBadInput = 2,     ///< arguments, problem strings or files that make no sense
  kCannot = 3,       ///< sensible, but this machine or build cannot do it
};

/// Parses the arguments and runs a command.
int run_cli(int argc, const char* const* argv);

}  // namespace tessera::tools
