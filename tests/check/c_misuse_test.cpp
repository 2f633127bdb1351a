// The C ABI with nothing in its hands: every pointer null in turn is an error with a text, or,
// where tessera.h says so, a default.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

// What a backward reads is what its forward wrote, and const.
static_assert(offsetof(tessera_tensors, saved_o) == offsetof(tessera_tensors, o));
static_assert(std::is_same_v<decltype(tessera_tensors::saved_o), tessera_const_tensor>);
static_assert(std::is_same_v<decltype(tessera_tensors::saved_softmax_lse), const float*>);
static_assert(std::is_same_v<decltype(Tensors::saved_o), ConstTensor>);
static_assert(std::is_same_v<decltype(Tensors::saved_softmax_lse), const float*>);

/// Two queries and keys of four columns, and a plan for them.
class CMisuse : public testing::Test {
 protected:
  void SetUp() override {
    tessera_problem_init(&problem_, sizeof problem_);
    ASSERT_EQ(tessera_problem_parse("fwd f32 q=2 k=2 d=4", &problem_, error_, sizeof error_),
              TESSERA_OK);
    tessera_tensors_init(&tensors_, sizeof tensors_);
    tensors_.q = {memory_[0], 8, 4, 4};
    tensors_.k = {memory_[1], 8, 4, 4};
    tensors_.v = {memory_[2], 8, 4, 4};
    tensors_.o = {memory_[3], 8, 4, 4};
    ASSERT_EQ(tessera_plan_create(&problem_, nullptr, &plan_, error_, sizeof error_), TESSERA_OK);
  }
  void TearDown() override { tessera_plan_destroy(plan_); }

  /// Takes the code, and that the text names the argument.
  void expect_invalid(int code, const std::string& named) {
    EXPECT_EQ(code, TESSERA_INVALID) << named;
    EXPECT_NE(std::string(error_).find(named), std::string::npos) << named << ": " << error_;
    error_[0] = '\0';
  }

  tessera_problem problem_;
  tessera_tensors tensors_;
  tessera_plan* plan_ = nullptr;
  char error_[256] = "";
  float memory_[4][8] = {};
};

TEST_F(CMisuse, NullIsAnError) {
  tessera_plan* made = plan_;
  char* const e = error_;
  constexpr std::size_t n = sizeof error_;
  expect_invalid(tessera_plan_create(nullptr, nullptr, &made, e, n), "problem = null");
  EXPECT_EQ(made, nullptr);
  expect_invalid(tessera_plan_create(&problem_, nullptr, nullptr, e, n), "plan = null");
  expect_invalid(tessera_plan_create(&problem_, "abacus", &made, e, n), "abacus");
  expect_invalid(tessera_run(nullptr, &tensors_, nullptr, 0, nullptr, e, n), "plan = null");
  expect_invalid(tessera_run(plan_, nullptr, nullptr, 0, nullptr, e, n), "tensors = null");
  expect_invalid(tessera_attend(nullptr, &tensors_, nullptr, nullptr, e, n), "problem = null");
  expect_invalid(tessera_attend(&problem_, nullptr, nullptr, nullptr, e, n), "tensors = null");
  expect_invalid(tessera_attend(&problem_, &tensors_, "abacus", nullptr, e, n), "abacus");
  expect_invalid(tessera_problem_parse(nullptr, &problem_, e, n), "text = null");
  expect_invalid(tessera_problem_parse("d=4", nullptr, e, n), "problem = null");
  expect_invalid(tessera_dropout_mask(nullptr, 1, 2, nullptr, e, n), "problem = null");
  expect_invalid(tessera_dropout_mask(&problem_, 1, 2, nullptr, e, n), "keep = null");
  expect_invalid(tessera_measure_peaks(nullptr, 0.0, nullptr, nullptr, e, n), "peaks = null");
  EXPECT_EQ(tessera_run(plan_, &tensors_, nullptr, 1 << 20, nullptr, e, n), TESSERA_WORKSPACE);
  for (float& x : memory_[3]) EXPECT_EQ(x, 0.0F);
}

TEST_F(CMisuse, ATensorThatIsNullIsNamed) {
  const struct {
    const char* name;
    tessera_const_tensor tessera_tensors::* tensor;
  } all[] = {{"q", &tessera_tensors::q},
             {"k", &tessera_tensors::k},
             {"v", &tessera_tensors::v},
             {"o", &tessera_tensors::saved_o}};
  for (const auto& one : all) {
    tessera_tensors broken = tensors_;
    (broken.*one.tensor).data = nullptr;
    expect_invalid(tessera_attend(&problem_, &broken, nullptr, nullptr, error_, sizeof error_),
                   std::string(one.name) + " = null");
  }
}

TEST_F(CMisuse, ExecutorsMustRun) {
  tessera_executor executor = {sizeof executor, 4, nullptr, nullptr};
  tessera_execution execution;
  tessera_execution_init(&execution, sizeof execution);
  execution.executor = &executor;
  const auto expect_refused = [&](const char* text) {
    expect_invalid(tessera_attend(&problem_, &tensors_, nullptr, &execution, error_, sizeof error_),
                   text);
    expect_invalid(tessera_run(plan_, &tensors_, nullptr, 0, &execution, error_, sizeof error_),
                   text);
  };
  expect_refused("executor.run = null");
  executor.num_threads = 0;
  expect_refused("executor.num_threads = 0");
  execution.size = 3;
  expect_refused("execution.size = 3");
  // In C++ the same structure is a mistake as easily made.
  const Executor empty{4, nullptr, nullptr};
  const Result<Problem> wide = parse_problem("fwd f32 b=2 h=2 q=2 k=2 d=4");
  ASSERT_TRUE(wide.ok());
  float rows[4][32] = {};
  Tensors t;
  t.q = {rows[0], 16, 8, 4};
  t.k = {rows[1], 16, 8, 4};
  t.v = {rows[2], 16, 8, 4};
  t.o = {rows[3], 16, 8, 4};
  Execution idle;
  idle.executor = &empty;
  EXPECT_EQ(attend(*wide, t, idle).text, "executor.run = null");
  EXPECT_EQ(measure_peaks(this_cpu(), 0.0, &empty).status().text, "executor.run = null");
}

/// The caller's workers run and its progress is told: both come through the C structures.
TEST_F(CMisuse, AnExecutionIsHeeded) {
  struct Heard {
    int runs = 0;
    std::int64_t done = 0, total = 0;
  } heard;
  tessera_executor executor = {
      sizeof executor, 2, &heard,
      [](void* self, int workers, void (*work)(void*, int), void* context) {
        ++static_cast<Heard*>(self)->runs;
        for (int i = 0; i < workers; ++i) work(context, i);
      }};
  tessera_execution execution;
  tessera_execution_init(&execution, sizeof execution);
  execution.executor = &executor;
  execution.progress = [](void* context, std::int64_t done, std::int64_t total) {
    static_cast<Heard*>(context)->done = done;
    static_cast<Heard*>(context)->total = total;
  };
  execution.progress_context = &heard;
  // Two sequences: one would be computed without asking anybody.
  problem_.batch = 2;
  float o[16];
  tensors_.o.data = o;
  for (tessera_const_tensor* input : {&tensors_.q, &tensors_.k, &tensors_.v})
    input->stride_batch = 0;
  for (const char* device : {static_cast<const char*>(nullptr), "portable"}) {
    heard = {};
    ASSERT_EQ(tessera_attend(&problem_, &tensors_, device, &execution, error_, sizeof error_),
              TESSERA_OK)
        << error_;
    EXPECT_EQ(heard.runs > 0, this_cpu().threads > 1);
    EXPECT_GT(heard.total, 0);
    EXPECT_EQ(heard.done, heard.total);
  }
}

TEST_F(CMisuse, TheOutputTypeIsAFieldOfItsOwn) {
  EXPECT_EQ(problem_.dtype_o, -1);
  char text[128] = "";
  tessera_problem_print(&problem_, text, sizeof text);
  EXPECT_EQ(std::string(text).find("o="), std::string::npos) << text;
  problem_.dtype_o = TESSERA_F16;
  tessera_problem_print(&problem_, text, sizeof text);
  EXPECT_NE(std::string(text).find(" o=f16"), std::string::npos) << text;
  EXPECT_EQ(tessera_attend(&problem_, &tensors_, nullptr, nullptr, error_, sizeof error_),
            TESSERA_OK)
      << error_;
  tessera_problem read;
  tessera_problem_init(&read, sizeof read);
  ASSERT_EQ(tessera_problem_parse(text, &read, error_, sizeof error_), TESSERA_OK) << error_;
  EXPECT_EQ(read.dtype_o, TESSERA_F16);
  problem_.dtype_o = -2;
  expect_invalid(tessera_attend(&problem_, &tensors_, nullptr, nullptr, error_, sizeof error_),
                 "dtype_o = -2");
  // A caller of before, whose structure ends there.
  tessera_problem older;
  constexpr std::size_t kOlder = offsetof(tessera_problem, dtype_o);
  tessera_problem_init(&older, kOlder);
  older.dtype_o = 99;
  older.head_dim = older.head_dim_v = 4;
  ASSERT_GT(tessera_problem_print(&older, text, sizeof text), 0U);
  EXPECT_EQ(std::string(text).find("o="), std::string::npos) << text;
}

TEST_F(CMisuse, ASecondQueryMeetsValues) {
  EXPECT_EQ(problem_.qv, 0);
  problem_.qv = 1;
  expect_invalid(tessera_attend(&problem_, &tensors_, nullptr, nullptr, error_, sizeof error_),
                 "qv = null");
  // Keys are 0. The values are unit vectors: scores are log(3) and 0 in units of softmax_scale.
  const float log3[8] = {std::sqrt(8.0F) * std::log(3.0F)};
  memory_[2][0] = memory_[2][5] = 1.0F;
  tensors_.qv = {log3, 8, 4, 4};
  ASSERT_EQ(tessera_attend(&problem_, &tensors_, nullptr, nullptr, error_, sizeof error_),
            TESSERA_OK)
      << error_;
  const float expected[8] = {0.75F, 0.25F, 0.0F, 0.0F, 0.5F, 0.5F};
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(memory_[3][i], expected[i], 1e-6) << i;
  char text[128] = "";
  tessera_problem_print(&problem_, text, sizeof text);
  EXPECT_NE(std::string(text).find(" qv"), std::string::npos) << text;
  problem_.qv = 2;
  expect_invalid(tessera_attend(&problem_, &tensors_, nullptr, nullptr, error_, sizeof error_),
                 "qv = 2");
  // Callers of before, whose structures end there.
  tessera_problem older;
  tessera_problem_init(&older, offsetof(tessera_problem, qv));
  ASSERT_EQ(tessera_problem_parse("fwd f32 q=2 k=2 d=4", &older, error_, sizeof error_),
            TESSERA_OK);
  older.qv = 1;
  tensors_.size = offsetof(tessera_tensors, qv);
  EXPECT_EQ(tessera_attend(&older, &tensors_, nullptr, nullptr, error_, sizeof error_), TESSERA_OK)
      << error_;
  EXPECT_NEAR(memory_[3][0], 0.5F, 1e-6);
}

/// Without an error's text, without a text to write to, without a structure: nothing is written.
TEST_F(CMisuse, NullOutputsAreSkipped) {
  EXPECT_EQ(tessera_attend(nullptr, nullptr, nullptr, nullptr, nullptr, 0), TESSERA_INVALID);
  EXPECT_EQ(tessera_attend(nullptr, nullptr, nullptr, nullptr, nullptr, 100), TESSERA_INVALID);
  EXPECT_EQ(tessera_explain(nullptr, nullptr, nullptr, 0), 0U);
  EXPECT_GT(tessera_explain(&problem_, nullptr, nullptr, 0), 100U);
  EXPECT_GT(tessera_explain(&problem_, nullptr, nullptr, 100), 100U);
  EXPECT_EQ(tessera_problem_print(nullptr, error_, sizeof error_), 0U);
  EXPECT_GT(tessera_problem_print(&problem_, nullptr, 7), 10U);
  EXPECT_EQ(tessera_plan_workspace_bytes(nullptr), 0U);
  EXPECT_STREQ(tessera_plan_kernel(nullptr), "");
  char error[64];
  EXPECT_EQ(tessera_prepare(nullptr, error, sizeof error), TESSERA_INVALID);
  EXPECT_STREQ(error, "plan = null");
  tessera_plan_destroy(nullptr);
  tessera_problem_init(nullptr, sizeof problem_);
  tessera_tensors_init(nullptr, sizeof tensors_);
  tessera_execution_init(nullptr, sizeof(tessera_execution));
  // Too small to hold even its size.
  alignas(8) std::uint32_t word[3] = {1, 2, 3};
  tessera_problem_init(reinterpret_cast<tessera_problem*>(word), sizeof word[0]);
  tessera_tensors_init(reinterpret_cast<tessera_tensors*>(word), sizeof word[0]);
  tessera_execution_init(reinterpret_cast<tessera_execution*>(word), sizeof word[0]);
  EXPECT_EQ(word[1], 2U);
}

TEST(Buffers, CopiesToAndFromNowhereAreErrors) {
  Result<Buffer> buffer = Buffer::allocate(this_cpu(), 8);
  ASSERT_TRUE(buffer.ok()) << buffer.status().text;
  EXPECT_EQ(buffer->write(nullptr, 8).text, "from = null: must point to the bytes");
  EXPECT_EQ(buffer->read(nullptr, 8).text, "to = null: must point to the bytes");
  EXPECT_TRUE(buffer->write(nullptr, 0).ok());
  EXPECT_EQ(Buffer().read(&buffer, 1).code, Code::invalid);
}

/// Two parts of a row of four columns.
class CCombine : public testing::Test {
 protected:
  void SetUp() override {
    tessera_partial_results_init(&results_, sizeof results_);
    results_.num_splits = 2;
    results_.seqlen_q = 1;
    results_.head_dim_v = 4;
    tessera_partial_tensors_init(&tensors_, sizeof tensors_);
    tensors_.o_parts = {parts_, 4, 8, 4, 4};
    tensors_.lse_parts = {lse_parts_, 1, 2, 1, 1};
    tensors_.o = {o_, 4, 4, 4};
    tensors_.softmax_lse = {&lse_, 1, 1, 1};
  }

  tessera_code combine(const char* device = nullptr) {
    return tessera_combine(&results_, &tensors_, device, nullptr, error_, sizeof error_);
  }

  tessera_partial_results results_;
  tessera_partial_tensors tensors_;
  float parts_[8] = {1.0F, 2.0F, 3.0F, 4.0F, 3.0F, 4.0F, 5.0F, 6.0F};
  float lse_parts_[2] = {0.0F, 0.0F};
  float o_[4] = {}, lse_ = 0.0F;
  char error_[256] = "";
};

TEST_F(CCombine, EqualPartsGiveTheirMean) {
  for (const char* device : {static_cast<const char*>(nullptr), "cpu"}) {
    o_[0] = 7.0F;
    ASSERT_EQ(combine(device), TESSERA_OK) << error_;
    for (int i = 0; i < 4; ++i) EXPECT_FLOAT_EQ(o_[i], static_cast<float>(i) + 2.0F);
    EXPECT_FLOAT_EQ(lse_, std::log(2.0F));
  }
}

TEST_F(CCombine, WrongArgumentsAreNamed) {
  char* const e = error_;
  constexpr std::size_t n = sizeof error_;
  EXPECT_EQ(tessera_combine(nullptr, &tensors_, nullptr, nullptr, e, n), TESSERA_INVALID);
  EXPECT_STREQ(e, "results = null");
  EXPECT_EQ(tessera_combine(&results_, nullptr, nullptr, nullptr, e, n), TESSERA_INVALID);
  EXPECT_STREQ(e, "tensors = null");
  EXPECT_EQ(combine("abacus"), TESSERA_INVALID);
  results_.dtype_o = 3;
  EXPECT_EQ(combine(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("dtype_o = 3"), 0U) << error_;
  results_.dtype_o = TESSERA_F32;
  tensors_.o.data = nullptr;
  EXPECT_EQ(combine(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("o = null"), 0U) << error_;
  results_.size = 0;
  EXPECT_EQ(combine(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("results.size = 0"), 0U) << error_;
}

TEST_F(CCombine, AnOlderCallersStructuresAreShorter) {
  results_.size = offsetof(tessera_partial_results, head_dim_v);
  EXPECT_EQ(combine(), TESSERA_INVALID);  // its default, 0
  EXPECT_EQ(std::string(error_).find("head_dim_v = 0"), 0U) << error_;
  SetUp();
  tensors_.size = offsetof(tessera_partial_tensors, softmax_lse);
  EXPECT_EQ(combine(), TESSERA_OK) << error_;
  EXPECT_EQ(lse_, 0.0F);
  tessera_partial_results_init(nullptr, sizeof results_);
  tessera_partial_tensors_init(nullptr, sizeof tensors_);
}

}  // namespace
}  // namespace tessera
