// What there is, and what the planner makes of a problem.
#include "answers.h"
#include "plan/catalog.h"
#include "plan/device_table.h"
#include "plan/names.h"
#include "plan/select.h"

namespace tessera::explorer {
namespace {

const char* name_of(core::Form form) { return form == core::Form::tile ? "tile" : "decode"; }

/// A row of the catalog, and its cost or refusal.
void write_row(const core::Kernel& row, const Problem& problem, const Device& device, bool chosen,
               Json& json) {
  const std::string reason = refusal(row, problem, device);
  json.begin_object().field("name", tessera::name_of(row)).field("form", name_of(row.form));
  json.field("block_m", row.block_m).field("tile_m", row.tile_m).field("block_n", row.block_n);
  if (reason.empty()) {
    json.field("cost", cost(plan_row(row, problem, device)));
  } else {
    json.field("refusal", reason);
  }
  json.field("chosen", chosen).end_object();
}

void write_plan(const Plan& plan, Json& json) {
  const PlanData& data = plan.data();
  json.field("kernel", plan.kernel());
  json.key("work").begin_object();
  json.field("items", data.work.count()).field("batch", data.work.batch);
  json.field("heads", data.work.heads).field("row_heads", data.row_heads);
  json.field("blocks", data.work.blocks).field("block_m", data.work.block_m);
  json.field("splits", data.work.splits).field("split_n", data.split_n);
  json.field("section", data.work.section).end_object();
  json.field("workspace_bytes", data.workspace_bytes).key("workspace").begin_array();
  for (const WorkspaceRegion& region : data.regions) {
    json.begin_object().field("name", region.name).field("offset", region.offset);
    json.field("bytes", region.bytes).end_object();
  }
  json.end_array();
}

}  // namespace

Status answer_devices(const Request& request, Json& json) {
  if (Status s = request.only({}); !s) return s;
  json.key("devices").begin_array();
  for (const Device& device : device_table()) {
    json.begin_object().field("name", device.name).field("arch", to_string(device.arch));
    json.field("gpu", is_gpu(device.arch)).field("workers", device.threads);
    json.field("l1_bytes", device.l1_bytes).field("l2_bytes", device.l2_bytes).end_object();
  }
  json.end_array();
  return {};
}

Status answer_parse(const Request& request, Json& json) {
  if (Status s = request.only({}); !s) return s;
  const Result<Problem> problem = request.problem();
  if (!problem) return problem.status();
  json.field("problem", to_string(*problem));
  return {};
}

Status answer_plan(const Request& request, Json& json) {
  if (Status s = request.only({}); !s) return s;
  const Result<Problem> problem = request.problem();
  if (!problem) return problem.status();
  const Result<Device> device = request.device();
  if (!device) return device.status();
  json.field("problem", to_string(*problem)).field("device", device->name);
  json.field("text", explain(*problem, *device));
  const Result<Plan> chosen = plan(*problem, *device);
  if (chosen) {
    write_plan(*chosen, json);
  } else {
    json.key("kernel").null().field("code", to_string(chosen.status().code));
    if (chosen.status().code == Code::invalid) {
      json.field("invalid", chosen.status().text);
      return {};
    }
  }
  json.key("rows").begin_array();
  for (const core::Kernel& row : kCatalog) {
    if (is_gpu(row.arch) != is_gpu(device->arch)) continue;
    write_row(row, *problem, *device, chosen && chosen->data().kernel == row, json);
  }
  json.end_array();
  return {};
}

}  // namespace tessera::explorer
