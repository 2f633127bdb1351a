// Runs of one problem under different circumstances, for tests that compare results bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "archs.h"
#include "check/inputs.h"
#include "reference/storage.h"
#include "tessera/tessera.hpp"

namespace tessera::tools {

/// Everything a run wrote, by name, in row-major order.
using Results = std::map<std::string, std::vector<double>>;

inline Problem parse(const std::string& text) {
  const Result<Problem> problem = parse_problem(text);
  EXPECT_TRUE(problem.ok()) << problem.status().text;
  return problem.ok() ? *problem : Problem{};
}

inline Device device_with(Arch arch, int threads) {
  Device device = this_cpu();
  device.arch = arch;
  device.threads = threads;
  return device;
}

/// Workers one after another, the last one first.
inline Executor reverse_executor(int num_threads) {
  const auto run = [](void*, int workers, void (*work)(void*, int), void* context) {
    for (int worker = workers; worker-- > 0;) work(context, worker);
  };
  return {num_threads, nullptr, run};
}

/// Plans and runs in poisoned workspace; the outputs stay in `memory`.
inline Status run_in(RunMemory& memory, const Device& device, const Executor& executor) {
  const Result<Plan> planned = plan(memory.problem(), device);
  if (!planned) return planned.status();
  const GuardedBuffer workspace(planned->workspace_bytes(), 0);
  const Execution execution{&executor, nullptr, nullptr};
  Status status = run(*planned, memory.tensors(), workspace.data(), workspace.bytes(), execution);
  EXPECT_TRUE(workspace.guards_intact()) << "memory next to the workspace was written";
  return status;
}

inline Results results_of(const RunMemory& memory) {
  Results results;
  for (const char* name : {"o", "softmax_lse", "dq", "dk", "dv", "dbias", "dsink"}) {
    if (memory.has_output(name)) results[name] = memory.output(name);
  }
  return results;
}

/// o and lse of a backward's memory, computed by the library itself: large problems take the
/// reference too long.
inline void run_forward(RunMemory& memory) {
  Problem forward = memory.problem();
  forward.pass = Pass::forward;
  std::vector<float> lse(static_cast<std::size_t>(forward.rows_q() * forward.num_heads));
  const std::int64_t dim = forward.head_dim_v;
  std::vector<std::byte> o(static_cast<std::size_t>(forward.rows_q() * forward.num_heads * dim *
                                                    size_of(forward.dtype)));
  Tensors tensors = memory.tensors();
  const std::int64_t row = forward.num_heads * dim;
  tensors.o = {o.data(), forward.packed ? 0 : forward.seqlen_q * row, row, dim};
  tensors.softmax_lse = lse.data();
  tensors.dout = {};
  tensors.dsoftmax_lse = nullptr;
  tensors.dq = tensors.dk = tensors.dv = {};
  tensors.dbias = {};
  tensors.dsink = nullptr;
  const Status status = attend(forward, tensors);
  ASSERT_TRUE(status.ok()) << status.text;
  std::vector<double> wide;
  for (std::int64_t i = 0; i < forward.rows_q() * row; ++i) {
    wide.push_back(reference::load(forward.dtype, o.data(), i));
  }
  memory.give_forward(wide, {lse.begin(), lse.end()});
}

}  // namespace tessera::tools
