// The C++ API: validate -> plan -> run. Everything here delegates.
#include "tessera/tessera.hpp"

#include <charconv>
#include <cstdint>

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "plan/catalog.h"
#include "plan/device_table.h"
#include "plan/names.h"
#include "plan/plan.h"

#define TESSERA_STRING(x) #x
#define TESSERA_XSTRING(x) TESSERA_STRING(x)

namespace tessera {

const char* version() {
  return TESSERA_XSTRING(TESSERA_VERSION_MAJOR) "." TESSERA_XSTRING(
      TESSERA_VERSION_MINOR) "." TESSERA_XSTRING(TESSERA_VERSION_PATCH);
}

Result<Device> this_gpu(int ordinal) { return cuda::device_at(ordinal); }

Result<std::string> driver_version() { return cuda::driver_version(); }

bool runs_here(std::string_view kernel) {
  for (const core::Kernel& row : kCatalog) {
    if (name_of(row) != kernel) continue;
    if (!is_gpu(row.arch)) return runs(best_arch(), row.arch);
    const Result<Device> gpu = this_gpu();
    return gpu && runs(gpu->arch, row.arch) && cuda::has_code(row, *gpu);
  }
  return false;
}

Result<Device> named_device(std::string_view name) {
  Device cpu = this_cpu();
  if (name == "cpu") return cpu;
  if (name == "gpu") return this_gpu();
  if (name.starts_with("gpu:")) {
    int ordinal = -1;
    const std::string_view digits = name.substr(4);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
    if (error == std::errc() && end == digits.data() + digits.size()) return this_gpu(ordinal);
  }
  for (const Arch arch : {Arch::portable, Arch::avx2, Arch::avx512, Arch::avx512_bf16}) {
    if (name != to_string(arch)) continue;
    if (!runs(cpu.arch, arch)) {
      return Status::device("device = '" + std::string(name) + "': this CPU has only " +
                            to_string(cpu.arch));
    }
    cpu.arch = arch;
    return cpu;
  }
  for (const Device& device : device_table()) {
    if (name == device.name) return device;
  }
  std::string known;
  for (const std::string& other : device_names()) known += (known.empty() ? "" : ", ") + other;
  return Status::invalid("device = '" + std::string(name) + "': unknown; known: " + known);
}

std::vector<std::string> device_names() {
  std::vector<std::string> names = {"cpu", "gpu", "portable", "avx2", "avx512", "avx512_bf16"};
  for (const Device& device : device_table()) names.push_back(device.name);
  return names;
}

Status run(const Plan& plan, const Tensors& tensors, void* workspace, std::size_t workspace_bytes,
           const Execution& execution) {
  const PlanData& data = plan.data();
  const bool on_gpu = is_gpu(data.kernel.arch);
  if (Status s = validate(data.problem, tensors, on_gpu ? Memory::device : Memory::host); !s)
    return s;
  if (workspace_bytes < data.workspace_bytes) {
    return Status::workspace("workspace_bytes = " + std::to_string(workspace_bytes) +
                             ": this plan needs " + std::to_string(data.workspace_bytes));
  }
  if (data.workspace_bytes > 0) {
    if (workspace == nullptr) {
      return Status::workspace("workspace = null: this plan needs " +
                               std::to_string(data.workspace_bytes) + " bytes");
    }
    if (reinterpret_cast<std::uintptr_t>(workspace) % Plan::workspace_alignment != 0) {
      return Status::workspace("workspace: must be aligned to " +
                               std::to_string(Plan::workspace_alignment) + " bytes");
    }
  }
  return on_gpu ? cuda::run(data, tensors, workspace, execution)
                : cpu::run(data, tensors, workspace, execution);
}

Result<Peaks> measure_peaks(const Device& device, double seconds, const Executor* executor) {
  return is_gpu(device.arch) ? cuda::measure_peaks(device, seconds)
                             : cpu::measure_peaks(device, seconds, executor);
}

}  // namespace tessera
