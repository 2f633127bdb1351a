// Result and Plan in wrong hands: who takes a value that is not there is stopped with the reason,
// and nothing that failed looks like a success.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "tessera/tessera.hpp"

namespace tessera {
namespace {

using Text = Result<std::string>;

/// Every way to a value that is not there ends with the status' text.
TEST(ResultDeathTest, AValueThatIsNotThereStopsWithTheReason) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const char* const said = "tessera: a Result without a value was used.*: no oil left";
  Text none = Status::device("no oil left");
  const Text& fixed = none;
  EXPECT_DEATH((void)(*none).size(), said);
  EXPECT_DEATH((void)(*fixed).size(), said);
  EXPECT_DEATH((void)none->size(), said);
  EXPECT_DEATH((void)fixed->size(), said);
  EXPECT_DEATH((void)none.value().size(), said);
  EXPECT_DEATH((void)fixed.value().size(), said);
  EXPECT_DEATH((void)std::string(*Text(none)), said);
  EXPECT_DEATH((void)std::string(Text(none).value()), said);
}

/// What users write when they are in a hurry: the text is the library's own.
TEST(ResultDeathTest, TheLibrarysOwnReasonsAreShown) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH((void)(*parse_problem("fwd f33")).head_dim, "'f33' is not understood");
  EXPECT_DEATH((void)(*named_device("abacus")).threads, "device = 'abacus': unknown");
  EXPECT_DEATH((void)this_gpu(99)->threads, "driver|this machine has");
  EXPECT_DEATH((void)plan({}, this_cpu())->kernel(), "head_dim = 0");
}

/// A value moves out of a Result that nobody else holds; a type that cannot be copied needs that.
TEST(Result, AValueMovesOut) {
  const auto make = [] { return Result<std::unique_ptr<int>>(std::make_unique<int>(7)); };
  const std::unique_ptr<int> taken = *make();
  const std::unique_ptr<int> also = make().value();
  EXPECT_EQ(*taken + *also, 14);
  Text text = std::string("here");
  EXPECT_EQ(*text + text.value() + *std::as_const(text), "hereherehere");
  EXPECT_EQ(text->size(), 4U);
}

/// Passing on the status of a Result without a value must not report success.
TEST(Result, ASuccessWithoutAValueIsAFailure) {
  const Text none = Status{};
  EXPECT_FALSE(none.ok());
  EXPECT_EQ(none.status().code, Code::invalid);
  EXPECT_NE(none.status().text.find("has no value"), std::string::npos) << none.status().text;
  EXPECT_TRUE(Text(std::string()).status().ok());
}

/// There is no empty Plan: what was moved from still answers.
TEST(Plan, AMovedFromPlanIsWhole) {
  static_assert(!std::is_default_constructible_v<Plan>);
  Problem problem;
  problem.seqlen_q = problem.seqlen_k = problem.head_dim = problem.head_dim_v = 8;
  Result<Plan> first = plan(problem, this_cpu());
  ASSERT_TRUE(first.ok()) << first.status().text;
  Plan taken = *std::move(first);
  const Plan last = std::move(taken);  // NOLINT(performance-move-const-arg): users do
  const Plan* const all[] = {&*first, &taken, &last};  // NOLINT(bugprone-use-after-move)
  for (const Plan* each : all) {
    EXPECT_EQ(each->problem(), problem);
    EXPECT_EQ(each->kernel(), last.kernel());
    EXPECT_EQ(each->workspace_bytes(), last.workspace_bytes());
  }
}

}  // namespace
}  // namespace tessera
