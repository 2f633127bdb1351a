// Timing of one problem: median, share of the peaks measured around it, memory. Called by
// bench_command.cpp and report_command.cpp.
#pragma once

#include <cstddef>
#include <string>

#include "tessera/tessera.hpp"

namespace tessera::tools {

struct BenchSettings {
  double seconds = 1.0;  ///< spent on a problem
  double peak_seconds = 0.05;
  bool cold = false;           ///< caches do not hold K and V
  bool heads_outside = false;  ///< (batch, heads, seqlen, head_dim) in memory
};

/// What was measured for one problem.
struct Measurement {
  Problem problem;
  std::string kernel;
  int threads = 0;
  double seconds = 0.0;          ///< median of the runs
  double best_seconds = 0.0;     ///< fastest run: what remains where neighbours disturb the machine
  double enqueue_seconds = 0.0;  ///< median of a call of run(); GPU: the host's part
  int runs = 0;                  ///< GPU: batches of them
  double flops = 0.0;            ///< of one run
  double kv_bytes = 0.0;         ///< of K and V, read once
  double peak_flops = 0.0;       ///< mean of before and after
  double peak_bytes = 0.0;
  std::size_t workspace = 0;
  double three_step_bytes = 0.0;

  double share() const { return flops / seconds / peak_flops; }
  double best_share() const { return flops / best_seconds / peak_flops; }
};

/// Random inputs. Errors: those of plan(), run() and the device's memory.
Result<Measurement> measure(const Problem& problem, const Device& device,
                            const BenchSettings& settings);

}  // namespace tessera::tools
