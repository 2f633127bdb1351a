// tessera check: random inputs from a printed seed, every output against the double reference.
#include <cstdio>
#include <random>

#include "check/check.h"
#include "commands.h"
#include "numbers.h"
#include "report.h"

namespace tessera::tools {

namespace {

struct CheckOptions {
  ProblemOptions what;
  DeviceOptions where;
  std::uint64_t seed = 0;
  bool seed_given = false;
  int count = 1;
  bool json = false;
};

Json verdicts_json(const Problem& problem, const CheckResult& result, std::uint64_t seed) {
  Json outputs = Json::array();
  for (const Verdict& v : result.verdicts) {
    // JSON has no NaN: an error that is not a number becomes null.
    outputs.push_back({{"output", v.output},
                       {"error", v.error},
                       {"bound", v.bound},
                       {"largest", v.largest},
                       {"pass", v.pass()}});
  }
  return {{"problem", to_string(problem)}, {"seed", seed},
          {"kernel", result.kernel},       {"pass", result.pass()},
          {"damage", result.damage},       {"outputs", outputs}};
}

void print_result(const CheckResult& result, std::uint64_t seed) {
  std::printf("seed %llu  %s  %s\n", static_cast<unsigned long long>(seed), result.kernel.c_str(),
              result.pass() ? "pass" : "FAIL");
  if (!result.damage.empty()) std::printf("  memory: %s\n", result.damage.c_str());
  Table table({"  output", "error", "bound", "largest |value|", ""});
  for (const Verdict& v : result.verdicts) {
    table.add({"  " + v.output, short_text(v.error), short_text(v.bound), short_text(v.largest),
               v.pass() ? "" : "FAIL"});
  }
  std::fputs(table.text().c_str(), stdout);
}

int run_check(const CheckOptions& options) {
  const auto problems = options.what.read();
  if (!problems) return fail(problems.status());
  std::uint64_t first_seed = options.seed;
  if (!options.seed_given) first_seed = std::random_device()() & 0xFFFFFFU;

  Json results = Json::array();
  int failures = 0;
  std::int64_t done = 0;
  Progress progress("checking");
  for (const Problem& problem : *problems) {
    const Result<Device> device = device_for(options.where, problem);
    if (!device) return fail(device.status());
    int wrong = 0;
    for (int i = 0; i < options.count; ++i) {
      const std::uint64_t seed = first_seed + static_cast<std::uint64_t>(i);
      const CheckResult result = check(problem, seed, *device);
      if (!result.status) return fail(result.status);
      wrong += result.pass() ? 0 : 1;
      if (options.json) {
        results.push_back(verdicts_json(problem, result, seed));
      } else if (!result.pass() || options.count == 1) {
        print_result(result, seed);
      }
      progress.update(++done, static_cast<std::int64_t>(problems->size()) * options.count);
    }
    failures += wrong;
    if (options.json) continue;
    std::printf("%s: %d passed, %d failed\n", to_string(problem).c_str(), options.count - wrong,
                wrong);
  }
  if (options.json) std::printf("%s\n", Json{{"results", results}}.dump(2).c_str());
  return failures == 0 ? kSuccess : kCheckFailed;
}

}  // namespace

void add_check(CLI::App& app, Context& context) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand(
      "check", "Run problems on random inputs and compare with the double-precision reference");
  command->footer(
      "Of each output: the error of the worst element, the bound that it must keep, and the "
      "largest\n"
      "magnitude in the reference's result, all three in the output's own units. Where gradients\n"
      "cancel, as of keys that are all alike, that magnitude may be smaller than the error.");
  options->what.add_to(*command);
  CLI::Option* seed = command
                          ->add_option("--seed", options->seed,
                                       "seed of the inputs; random if not given, always printed")
                          ->transform(any_seed());
  command->add_option("--count", options->count, "checks of each, with seeds SEED, SEED + 1, ...")
      ->transform(whole_number(1, 1000000));
  options->where.add_to(*command);
  command->add_flag("--json", options->json, "print JSON");
  command->callback([options, seed, &context] {
    options->seed_given = seed->count() > 0;
    context.exit_code = run_check(*options);
  });
}

}  // namespace tessera::tools
