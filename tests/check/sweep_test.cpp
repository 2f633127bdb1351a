// The library against the double reference over the generated list of problems: every pair of
// features, every instruction set of this machine. Fresh numbers in every run; a failure prints the
// command that repeats it. TESSERA_CHECK_COUNT makes the list longer or shorter, TESSERA_CHECK_SEED
// another one, TESSERA_CHECK_FILTER keeps the commands that contain a text ("--device avx2"),
// TESSERA_CHECK_TRACE prints every command before it runs, to find a crash.
#include "check/sweep.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>

#include "archs.h"
#include "check/check.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kCount = kSanitized ? 1200 : kFullSweep;

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

TEST(Problems, EveryPairOfFeaturesOccurs) {
  constexpr Arch kAll = Arch::avx512_bf16;
  const std::vector<Case> list = cases(SweepOptions{}.seed, kFullSweep, kAll);
  EXPECT_GE(static_cast<std::int64_t>(list.size()), kFullSweep);
  Pairs pairs;
  EXPECT_GT(pairs.missing(kAll).size(), 10000U);  // so many there are
  for (const Case& item : list) {
    const Status status = validate(item.problem);
    ASSERT_TRUE(status.ok()) << item.command() << ": " << status.text;
    const Result<Problem> again = parse_problem(to_string(item.problem));
    ASSERT_TRUE(again.ok() && *again == item.problem) << item.command();
    ASSERT_EQ(variation_of(item.seed()), item.variation);
    pairs.add(item);
  }
  EXPECT_TRUE(pairs.missing(kAll).empty());
}

TEST(Problems, TheSameSeedGivesTheSameList) {
  const std::vector<Case> a = cases(7, 50, Arch::avx2), b = cases(7, 50, Arch::avx2);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].command(), b[i].command());
  EXPECT_NE(a[0].command(), cases(8, 50, Arch::avx2)[0].command());
}

/// In four parts, so that several can run at a time.
class Sweep : public ::testing::TestWithParam<int> {};

TEST_P(Sweep, AgreesWithTheReference) {
  SweepOptions options;
  options.seed = std::strtoull(environment("TESSERA_CHECK_SEED", "1"), nullptr, 10);
  options.count = kCount;
  if (const char* count = std::getenv("TESSERA_CHECK_COUNT")) {
    options.count = std::strtoll(count, nullptr, 10);
  }
  options.filter = environment("TESSERA_CHECK_FILTER", "");
  options.input_seed = std::random_device{}();
  options.part = GetParam();
  options.parts = 4;
  options.log = stdout;
  options.trace = std::getenv("TESSERA_CHECK_TRACE") != nullptr;
  const SweepResult result = sweep(options);
  std::printf("%lld passed, %zu failed\n", static_cast<long long>(result.passed),
              result.failures.size());
  EXPECT_TRUE(result.failures.empty());
  EXPECT_GT(result.passed, 0);
}

/// Checks the problems in every type on every instruction set of this machine.
void check_everywhere(std::initializer_list<const char*> problems) {
  for (const char* text : problems) {
    for (const char* dtype : all_or_one({"f32", "bf16", "f16"})) {
      for (const Arch arch : archs()) {
        Case item;
        item.problem = *parse_problem(std::string(text) + " " + dtype);
        item.variation.all_outputs = true;
        item.random = std::random_device{}();
        item.arch = arch;
        item.threads = 3;
        Device device = this_cpu();
        device.arch = arch;
        device.threads = item.threads;
        const CheckResult result = check(item.problem, item.seed(), device);
        EXPECT_TRUE(result.pass()) << item.command() << "\n" << result.summary();
      }
    }
  }
}

/// Sums of many blocks, more than the sweep's problems have: an accumulator of 16 bits, or a block
/// that is lost, shows here.
TEST(LongSums, AgreeWithTheReference) {
  check_everywhere({"fwd h=1 q=1 k=20000 d=16", "fwd h=1 q=40 k=6000 d=16 causal",
                    "bwd h=1 q=4000 k=24 d=16", "bwd h=1 q=24 k=4000 d=16"});
}

/// Rows of K and V 2 and 4 KiB apart, which the forward copies block by block, several blocks of
/// them: full, cut off in the middle of a step and of a pair, and left early by a mask.
TEST(CrowdedRows, AgreeWithTheReference) {
  check_everywhere({"fwd h=16 q=20 k=601 d=64", "fwd h=16 q=35 k=301 d=64 causal",
                    "fwd h=16 q=40 k=515 d=64 window=300,20"});
}

/// Splits of what a window leaves, with more sink tokens than the window has keys, a few, and keys
/// that a chunk cuts off; lengths and pages of a cache besides.
TEST(SplitKeys, AgreeWithTheReference) {
  check_everywhere({"fwd h=1 q=1 k=6000 d=16 window=1100,0 sink_tokens=3000",
                    "fwd h=4/1 q=3 k=6000 d=16 window=2000,0 sink_tokens=70",
                    "fwd h=1 q=2 k=6000 d=16 chunk=2500 sink_tokens=5",
                    "fwd b=4 h=2/1 q=2 k=6000 d=16 causal cache=after pages=400x48 leftpad",
                    "fwd b=4 h=2/1 q=2 k=5000 d=16 window=1500,0 sink_tokens=900 cache=after"});
}

INSTANTIATE_TEST_SUITE_P(Part, Sweep, ::testing::Range(0, 4));

}  // namespace
}  // namespace tessera::tools
