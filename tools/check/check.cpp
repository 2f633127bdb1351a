#include "check/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>

#include "check/device_copy.h"
#include "check/inputs.h"
#include "core/storage.h"
#include "plan/catalog.h"
#include "plan/names.h"
#include "reference/naive.h"
#include "reference/noise.h"
#include "reference/storage.h"

namespace tessera::tools {
namespace {

/// An executor that runs its workers one after another, the last one first.
Executor reverse_executor(int num_threads) {
  const auto run = [](void*, int workers, void (*work)(void*, int), void* context) {
    for (int worker = workers; worker-- > 0;) work(context, worker);
  };
  return {num_threads, nullptr, run};
}

/// Pools outlive a check: a sweep runs thousands.
Executor pool_executor(int num_threads) {
  if (num_threads == 1) return inline_executor();
  thread_local std::optional<ThreadPool> pool;
  thread_local int threads = 0;
  if (threads != num_threads) {
    pool.emplace(num_threads);
    threads = num_threads;
  }
  return pool->executor();
}

Status execute_on_gpu(const Plan& plan, const RunMemory& memory, std::string& damage) {
  const Result<DeviceCopy> copy = DeviceCopy::of(memory, plan.device());
  if (!copy) return copy.status();
  const Result<Buffer> workspace = Buffer::allocate(plan.device(), plan.workspace_bytes());
  if (!workspace) return workspace.status();
  if (Status s = run(plan, copy->tensors(), workspace->data(), plan.workspace_bytes()); !s)
    return s;
  if (Status s = synchronize(plan.device()); !s) return s;
  if (Status s = copy->bring_back(memory); !s) return s;
  damage = memory.damage();
  return {};
}

Status execute(const Plan& plan, RunMemory& memory, bool in_reverse, std::string& damage) {
  if (is_gpu(plan.device().arch)) return execute_on_gpu(plan, memory, damage);
  const GuardedBuffer workspace(plan.workspace_bytes(), 0);
  const int threads = plan.device().threads;
  const Executor executor = in_reverse ? reverse_executor(threads) : pool_executor(threads);
  const Execution execution{&executor, nullptr, nullptr};
  Status status = run(plan, memory.tensors(), workspace.data(), plan.workspace_bytes(), execution);
  damage = workspace.guards_intact() ? memory.damage() : "memory next to the workspace was written";
  return status;
}

}  // namespace

void give_forward(RunMemory& memory) {
  Problem forward = memory.problem();
  forward.pass = Pass::forward;
  const reference::Outputs exact = reference::attend({forward, memory.tensors()});
  memory.give_forward(exact.o, exact.lse);
}

std::vector<Verdict> judge_all(const RunMemory& memory, const std::string& kernel) {
  const Problem& p = memory.problem();
  const reference::Inputs inputs(p, memory.tensors());
  const reference::Outputs exact = reference::attend(inputs);
  const reference::Outputs naive = reference::naive(inputs);
  const auto* const row = std::find_if(kCatalog.begin(), kCatalog.end(),
                                       [&](const auto& one) { return name_of(one) == kernel; });
  const bool known = row != kCatalog.end();
  const bool integers = known && core::score_dtype_of(row->operand) == Dtype::i8;
  const reference::Outputs noise =
      reference::noise(inputs, exact, integers ? core::dtype_of(row->operand) : Dtype::f32);
  const struct {
    const char* name;
    std::vector<double> reference::Outputs::* values;
    Dtype dtype;
  } outputs[] = {
      {"o", &reference::Outputs::o, p.stored_o()},
      {"softmax_lse", &reference::Outputs::lse, Dtype::f32},
      {"dq", &reference::Outputs::dq, p.dtype},
      {"dk", &reference::Outputs::dk, p.dtype},
      {"dv", &reference::Outputs::dv, p.dtype},
      {"dbias", &reference::Outputs::dbias, p.bias ? p.bias->dtype : Dtype::f32},
      {"dsink", &reference::Outputs::dsink, Dtype::f32},
  };
  std::vector<Verdict> verdicts;
  if (known && row->operand == core::Operand::e4m3) {
    return judge_eight_bits(
        *row, inputs, exact, noise, memory.output("o"),
        memory.has_output("softmax_lse") ? memory.output("softmax_lse") : std::vector<double>());
  }
  for (const auto& output : outputs) {
    if (!memory.has_output(output.name)) continue;
    verdicts.push_back(judge({output.name, &(exact.*output.values), &(naive.*output.values),
                              &(noise.*output.values), output.dtype},
                             memory.output(output.name)));
  }
  return verdicts;
}

bool CheckResult::pass() const {
  return status.ok() && damage.empty() &&
         std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& v) { return v.pass(); });
}

std::string CheckResult::summary() const {
  if (!status.ok()) return std::string(to_string(status.code)) + ": " + status.text;
  if (!damage.empty()) return damage;
  const auto share = [](const Verdict& v) {
    const double ratio = v.error == 0.0 ? 0.0 : v.error / v.bound;
    return std::isnan(ratio) ? HUGE_VAL : ratio;
  };
  const auto worst =
      std::max_element(verdicts.begin(), verdicts.end(),
                       [&](const Verdict& a, const Verdict& b) { return share(a) < share(b); });
  if (worst == verdicts.end()) return "no outputs";
  char text[160];
  std::snprintf(text, sizeof text, "%s: error %.3g, bound %.3g, largest |value| %.3g",
                worst->output.c_str(), worst->error, worst->bound, worst->largest);
  return text;
}

CheckResult check(const Problem& problem, std::uint64_t seed, const Device& device,
                  bool in_reverse) {
  CheckResult result;
  Problem checked = problem;
  Result<Plan> planned = plan(checked, device);
  result.status = planned.status();
  if (!planned) return result;
  std::optional<RunMemory> memory(std::in_place, checked, seed);
  if (is_gpu(device.arch) && needs_unaligned(checked, memory->tensors())) {
    checked.unaligned = true;
    Result<Plan> other = plan(checked, device);
    if (other) {
      planned = std::move(other);
    } else {
      // No kernel takes such tensors: the seed's others, side by side.
      Variation variation = variation_of(seed);
      variation.strided = false;
      memory.emplace(problem, seed_with(variation, seed >> 6));
    }
  }
  result.kernel = std::string(planned->kernel());
  if (problem.pass == Pass::backward) give_forward(*memory);
  result.status = execute(*planned, *memory, in_reverse, result.damage);
  if (result.status.ok()) result.verdicts = judge_all(*memory, result.kernel);
  return result;
}

}  // namespace tessera::tools
