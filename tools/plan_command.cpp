// tessera plan: which kernel a problem gets, on this or any named device, and why.
#include <cstdio>

#include "commands.h"
#include "plan/plan.h"

namespace tessera::tools {

namespace {

struct PlanOptions {
  std::string problem;
  DeviceOptions where;
  bool json = false;
};

Json plan_json(const Plan& plan) {
  Json regions = Json::array();
  for (const WorkspaceRegion& region : plan.workspace_regions()) {
    regions.push_back({{"name", region.name}, {"offset", region.offset}, {"bytes", region.bytes}});
  }
  const PlanData& data = plan.data();
  return {{"problem", to_string(plan.problem())},
          {"device", plan.device().name},
          {"arch", to_string(plan.device().arch)},
          {"threads", plan.device().threads},
          {"kernel", plan.kernel()},
          {"work_items", data.work.count()},
          {"longest_keys", data.longest_keys},
          {"key_bytes", data.key_bytes},
          {"split_keys", data.split_n},
          {"splits", data.work.splits},
          {"unit_keys", data.unit_n},
          {"spans", data.unit_n > 0 ? data.spans.count : 0},
          {"workspace_bytes", plan.workspace_bytes()},
          {"workspace_regions", regions}};
}

int run_plan(const PlanOptions& options) {
  const Result<Problem> problem = parse_problem(options.problem);
  if (!problem) return fail(problem.status());
  const Result<Device> device = device_for(options.where, *problem);
  if (!device) return fail(device.status());
  const Result<Plan> planned = plan(*problem, *device);
  if (options.json) {
    if (!planned) return fail(planned.status());
    std::printf("%s\n", plan_json(*planned).dump(2).c_str());
    return kSuccess;
  }
  std::fputs(explain(*problem, *device).c_str(), stdout);
  return planned ? kSuccess : planned.status().code == Code::invalid ? kBadInput : kCannot;
}

}  // namespace

void add_plan(CLI::App& app, Context& context) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command =
      app.add_subcommand("plan", "Show which kernel a problem gets, what it costs, and why");
  command->add_option("problem", options->problem, "the problem, in one line")->required();
  options->where.add_to(*command);
  command->add_flag("--json", options->json, "print JSON");
  command->callback([options, &context] { context.exit_code = run_plan(*options); });
}

}  // namespace tessera::tools
