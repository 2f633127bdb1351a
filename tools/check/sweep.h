// sweep: checks a list of generated problems on several threads at once, with progress. Called by
// the tests and the command.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "check/problems.h"

namespace tessera::tools {

struct SweepOptions {
  std::uint64_t seed = 1;        ///< of the list of problems
  std::uint64_t input_seed = 0;  ///< of the numbers; each case prints the seed that repeats it
  std::int64_t count = kFullSweep;
  Arch best = best_arch();   ///< instruction sets up to this one
  std::string filter;        ///< only cases whose command contains this text
  int part = 0, parts = 1;   ///< only every parts-th case
  int threads = 0;           ///< problems checked at a time; 0: one per hardware thread
  std::FILE* log = nullptr;  ///< failures and progress; null: silent
  bool trace = false;        ///< also every command before it runs, to find a crash
};

struct SweepResult {
  std::int64_t passed = 0;
  std::vector<std::string> failures;  ///< the command that repeats it, and what was wrong
};

SweepResult sweep(const SweepOptions& options);

}  // namespace tessera::tools
