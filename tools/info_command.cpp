// tessera info: this machine, its peaks, the devices that can be planned for, the catalog.
#include <cstdio>

#include "commands.h"
#include "plan/catalog.h"
#include "plan/names.h"
#include "report.h"

namespace tessera::tools {

namespace {

struct InfoOptions {
  bool json = false;
  bool peaks = false;
};

Json catalog_json() {
  Json rows = Json::array();
  for (const core::Kernel& row : kCatalog) {
    rows.push_back({{"name", name_of(row)},
                    {"block_m", row.block_m},
                    {"tile_m", row.tile_m},
                    {"block_n", row.block_n},
                    {"split_n", row.split_n},
                    {"runs_here", runs_here(name_of(row))}});
  }
  return rows;
}

/// The GPUs that kernels run on, and why there are no others.
struct Gpus {
  std::vector<Device> usable;
  std::string rest;    ///< what was said of the first one that is not
  std::string driver;  ///< CUDA version; empty: none

  Gpus() {
    if (const Result<std::string> version = driver_version()) driver = *version;
    for (int ordinal = 0;; ++ordinal) {
      const Result<Device> gpu = this_gpu(ordinal);
      if (!gpu) {
        rest = gpu.status().text;
        break;
      }
      usable.push_back(*gpu);
    }
  }
};

Json gpus_json() {
  const Gpus gpus;
  Json list = Json::array();
  for (const Device& gpu : gpus.usable) {
    list.push_back({{"name", gpu.name},
                    {"arch", to_string(gpu.arch)},
                    {"multiprocessors", gpu.threads},
                    {"shared_bytes", gpu.l1_bytes},
                    {"l2_bytes", gpu.l2_bytes}});
  }
  return {{"driver", gpus.driver}, {"usable", list}, {"rest", gpus.rest}};
}

void print_gpus() {
  const Gpus gpus;
  if (gpus.usable.empty()) std::printf("gpu        none: %s\n", gpus.rest.c_str());
  for (const Device& gpu : gpus.usable) {
    std::printf("gpu:%d      %s, %s, %d multiprocessors, L2 %s, driver of CUDA %s\n", gpu.ordinal,
                gpu.name.c_str(), to_string(gpu.arch), gpu.threads,
                bytes_text(static_cast<double>(gpu.l2_bytes)).c_str(), gpus.driver.c_str());
  }
}

Json info_json(const Device& cpu, const Peaks* peaks) {
  Json json = {{"version", version()},
               {"cpu",
                {{"name", cpu.name},
                 {"arch", to_string(cpu.arch)},
                 {"threads", cpu.threads},
                 {"l1_bytes", cpu.l1_bytes},
                 {"l2_bytes", cpu.l2_bytes}}},
               {"gpu", gpus_json()},
               {"devices", device_names()},
               {"catalog", catalog_json()}};
  if (peaks != nullptr) {
    json["peaks"] = {{"f32_flops", peaks->f32_flops},
                     {"bf16_flops", peaks->bf16_flops},
                     {"read_bytes", peaks->read_bytes}};
  }
  return json;
}

void print_info(const Device& cpu, const Peaks* peaks) {
  std::printf("tessera    %s\n", version());
  std::printf("cpu        %s\n", cpu.name.c_str());
  std::printf("runs       %s, %d thread%s, L1 %s, L2 %s a core\n", to_string(cpu.arch), cpu.threads,
              cpu.threads == 1 ? "" : "s", bytes_text(static_cast<double>(cpu.l1_bytes)).c_str(),
              bytes_text(static_cast<double>(cpu.l2_bytes)).c_str());
  if (peaks != nullptr) {
    std::printf("peaks      fp32 %sFLOP/s, bf16 %sFLOP/s, memory read %sB/s\n",
                rate_text(peaks->f32_flops).c_str(),
                peaks->bf16_flops > 0 ? rate_text(peaks->bf16_flops).c_str() : "no ",
                rate_text(peaks->read_bytes).c_str());
  }
  print_gpus();
  std::string names;
  for (const std::string& name : device_names()) names += (names.empty() ? "" : ", ") + name;
  std::printf("devices    %s\n\n", names.c_str());
  Table table({"kernel", "block_m", "tile_m", "block_n", "split_n", "here"});
  for (const core::Kernel& row : kCatalog) {
    table.add({name_of(row), std::to_string(row.block_m), std::to_string(row.tile_m),
               std::to_string(row.block_n), std::to_string(row.split_n),
               runs_here(name_of(row)) ? "yes" : "no"});
  }
  std::fputs(table.text().c_str(), stdout);
}

int run_info(const InfoOptions& options) {
  const Device cpu = this_cpu();
  Peaks measured;
  if (options.peaks) {
    const Result<Peaks> peaks = measure_peaks(cpu, 0.1);
    if (!peaks) return fail(peaks.status());
    measured = *peaks;
  }
  const Peaks* shown = options.peaks ? &measured : nullptr;
  if (options.json) {
    std::printf("%s\n", info_json(cpu, shown).dump(2).c_str());
  } else {
    print_info(cpu, shown);
  }
  return kSuccess;
}

}  // namespace

void add_info(CLI::App& app, Context& context) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "Show this machine, the known devices and every kernel");
  command->add_flag("--peaks", options->peaks, "measure what this machine reaches (0.3 s)");
  command->add_flag("--json", options->json, "print JSON");
  command->callback([options, &context] { context.exit_code = run_info(*options); });
}

}  // namespace tessera::tools
