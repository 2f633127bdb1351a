// check: runs one problem on random inputs and holds every output against the double reference. The
// problem string, the seed, the instruction set and the number of threads reproduce it.
#pragma once

#include <string>
#include <vector>

#include "check/inputs.h"
#include "check/judge.h"
#include "tessera/tessera.hpp"

namespace tessera::tools {

struct CheckResult {
  Status status;                  ///< of plan() and run()
  std::string kernel;             ///< the catalog row that ran
  std::vector<Verdict> verdicts;  ///< one per output
  std::string damage;             ///< memory that the run should not have touched; empty: none

  bool pass() const;
  /// One line: the worst output, or what went wrong.
  std::string summary() const;
};

/// The o and lse that a backward is given become the reference's, rounded to storage, so that the
/// backward is judged alone.
void give_forward(RunMemory& memory);

/// Every output of a run of `kernel`, a row of the catalog, against the reference.
std::vector<Verdict> judge_all(const RunMemory& memory, const std::string& kernel);

/// Inputs follow from the seed (check/inputs.h); on a GPU those that need it make the
/// problem an unaligned one, or lie side by side where no kernel takes such. The device must be
/// this machine's CPU, with an instruction set it has, or a GPU of it. On a CPU device.threads
/// workers run, one after another in reverse order if `in_reverse`.
CheckResult check(const Problem& problem, std::uint64_t seed, const Device& device,
                  bool in_reverse = false);

}  // namespace tessera::tools
