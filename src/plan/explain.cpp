// The planner's account of itself: the problem, every row for devices of this kind with its cost or
// refusal, and the memory.
#include <algorithm>
#include <cstdio>

#include "plan/catalog.h"
#include "plan/layout.h"
#include "plan/names.h"
#include "plan/select.h"

namespace tessera {

namespace {

/// 12345678 -> "12,345,678"
std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

std::string padded_left(const std::string& text, std::size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

std::string padded_right(const std::string& text, std::size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

/// A line for every row of the device's kind: what keeps all others back is the device alone, so
/// their number does.
std::string candidates_text(const Problem& problem, const Device& device,
                            const core::Kernel* chosen) {
  const bool on_gpu = is_gpu(device.arch);
  std::string text = on_gpu ? "candidates (estimated multiprocessor cycles a query head)\n"
                            : "candidates (estimated core cycles a key/value head)\n";
  int others = 0, of_other_gpus = 0;
  for (const core::Kernel& row : kCatalog) {
    if (is_gpu(row.arch) != on_gpu) {
      ++others;
      continue;
    }
    if (on_gpu && !runs(device.arch, row.arch)) {
      ++of_other_gpus;
      continue;
    }
    const std::string reason = refusal(row, problem, device);
    text += std::string(chosen != nullptr && *chosen == row ? " * " : "   ") +
            padded_right(name_of(row), 47) +
            (reason.empty() ? padded_left(grouped(cost(plan_row(row, problem, device))), 20)
                            : "refused: " + reason) +
            "\n";
  }
  if (of_other_gpus > 0) {
    text += "   " + std::to_string(of_other_gpus) + " rows for other GPUs are left out\n";
  }
  return text + "   " + std::to_string(others) +
         (on_gpu
              ? " rows for CPUs are left out; name a CPU as the device to see them, e.g. cpu\n"
              : " rows for GPUs are left out; name a GPU as the device to see them, e.g. h200\n");
}

/// How a forward's keys are divided. Lengths are those of the longest sequence: a cache's are read
/// where the kernel runs.
std::string keys_text(const PlanData& data) {
  const std::string longest = "keys       up to " + grouped(data.longest_keys) + " a sequence";
  if (data.unit_n == 0) {
    if (data.split_n == 0) return longest + ", not divided\n";
    return longest + ", divided in parts of " + grouped(data.split_n) + ": up to " +
           grouped(data.work.splits) + " an item, merged in their order\n";
  }
  // The layout counts with the capacity; what masks hide is not read.
  const Problem& p = data.problem;
  const bool narrow = p.window_left >= 0 || p.chunk > 0 || p.sink_tokens > 0;
  const std::int64_t units = core::min(
      units_of_item(data),
      core::max<std::int64_t>(1, core::ceil_div<std::int64_t>(data.longest_keys, data.unit_n)) +
          (narrow ? 1 : 0));
  const std::int64_t all = data.work.count() * units;
  Workspace counter;
  const std::int64_t slots = layout(counter, data).gpu_decode.slots;
  std::string text = longest + ", divided in units of " + std::to_string(data.unit_n) + ": up to " +
                     grouped(units) + " an item, " + grouped(all) + " in all, " +
                     grouped(core::ceil_div<std::int64_t>(all, data.spans.count)) + " a span\n";
  if (slots == 0) return text + "parts      none: an item is one unit\n";
  return text + "parts      up to " + grouped(slots) +
         (p.batch_invariant ? ", one a unit, so that a sequence's do not depend on the batch\n"
                            : ", where spans end within items: one a span\n");
}

/// What a forward reads and writes, each byte once.
std::string bytes_text(const PlanData& data) {
  const Problem& p = data.problem;
  const double rows = static_cast<double>(p.rows_q()) * static_cast<double>(p.num_heads);
  const auto bytes = [rows](std::int64_t dim, Dtype dtype) {
    return grouped(static_cast<std::int64_t>(
        core::min(rows * static_cast<double>(dim * size_of(dtype)), 9e18)));
  };
  return "bytes      up to " + grouped(data.key_bytes) + " of keys and values, " +
         bytes(p.score_dim(), p.dtype) + " of queries, " + bytes(p.head_dim_v, p.stored_o()) +
         " of outputs\n";
}

/// What is read and written before the kernel runs, if anything.
std::string laid_text(const PlanData& data) {
  if (!lays_values(data)) return {};
  Workspace counter;
  const GpuValueLayout values = layout(counter, data).gpu_values;
  const std::int64_t written = (data.problem.packed ? 1 : data.problem.batch) * values.batch_bytes;
  return "values     in rows: laid out first as tiles of " + std::to_string(values.tiles.columns) +
         " columns, up to " + grouped(written) + " bytes in the workspace\n";
}

/// What a device has that no kernel here uses.
std::string unused_text(const Device& device) {
  if (device.arch != Arch::sm80 || device.capability < 100 || device.capability >= 120) return {};
  return "unused     tcgen05, this GPU's own matrix instructions. FlashAttention-2, by mma.sync as "
         "these kernels, has been published at 308 to 380 of a B200's 2,250 TFLOP/s\n";
}

}  // namespace

std::string explain(const Problem& problem, const Device& device) {
  std::string text = "problem    " + to_string(problem) + "\n";
  text += "device     " + device.name + " (" + to_string(device.arch) + ", " +
          std::to_string(device.threads) +
          (is_gpu(device.arch)   ? " multiprocessors"
           : device.threads == 1 ? " thread"
                                 : " threads") +
          ")\n";
  text += unused_text(device);
  for (const Status& s : {validate(problem), validate(device)}) {
    if (!s) return text + "invalid    " + s.text + "\n";
  }

  const Result<Plan> chosen = [&]() -> Result<Plan> {
    // plan() itself calls explain() when nothing fits, so look before asking.
    for (const core::Kernel& row : kCatalog) {
      if (refusal(row, problem, device).empty()) return plan(problem, device);
    }
    return Status::unsupported("no row accepts the problem");
  }();
  text += "kernel     " + (chosen ? std::string(chosen->kernel()) : "none") + "\n";
  text += candidates_text(problem, device, chosen ? &chosen->data().kernel : nullptr);
  if (!chosen) return text;
  const PlanData& data = chosen->data();
  const core::WorkOrder& work = data.work;
  text += "work       " + grouped(work.count()) + " items = batch " + std::to_string(work.batch) +
          (is_gpu(device.arch) ? " x heads " : " x heads_k ") + std::to_string(work.heads) +
          (problem.pass == Pass::forward ? " x row blocks " : " x key blocks ") +
          std::to_string(work.blocks) + " x splits " + std::to_string(work.splits) +
          (data.unit_n > 0 ? ", in " + std::to_string(data.spans.count) + " spans of units of " +
                                 std::to_string(data.unit_n) + " keys"
                           : "") +
          "\n";
  if (problem.pass == Pass::forward) text += keys_text(data) + bytes_text(data) + laid_text(data);
  text += "workspace  " + grouped(static_cast<std::int64_t>(data.workspace_bytes)) + " bytes\n";
  for (const WorkspaceRegion& region : data.regions) {
    text += "   " + padded_right(region.name, 12) +
            padded_left(grouped(static_cast<std::int64_t>(region.bytes)), 16) + " bytes\n";
  }
  return text;
}

}  // namespace tessera
