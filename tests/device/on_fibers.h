// What tests of kernels on fibers share: a row's plan is launched by the library on a fake driver,
// run thread by thread with its barriers, copies and products, and judged like a GPU's.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check/check.h"
#include "check/inputs.h"
#include "cuda/backend.h"
#include "cuda/driver.h"
#include "cuda/fake_code.h"
#include "cuda/fake_driver.h"
#include "kernels.h"
#include "lost_page.h"
#include "lost_sequence.h"
#include "plan/catalog.h"
#include "plan/names.h"
#include "plan/select.h"
#include "races.h"

namespace tessera::device {

/// Of a row of the catalog: on a GPU that runs it, of the driver that tests have.
class OnFibers : public testing::TestWithParam<core::Kernel> {
 protected:
  void SetUp() override {
    fake::state() = {};
    if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
    const bool turing = GetParam().arch == Arch::sm75;
    const bool older = GetParam().arch == Arch::sm80 || turing;
    if (older) {  // an A100 with the shared memory that all rows fit, or a T4; no other test has
                  // loaded there
      fake::state().attributes = {{cuda::kComputeMajor, turing ? 7 : 8},
                                  {cuda::kComputeMinor, turing ? 5 : 0},
                                  {cuda::kSharedBytesOptin, turing ? 65536 : 232448}};
    }
    const Result<Device> gpu = this_gpu(older ? 1 : 0);
    ASSERT_TRUE(gpu.ok()) << gpu.status().text;
    gpu_ = *gpu;
    ASSERT_TRUE(cuda::has_code(GetParam(), gpu_));
    fake::state().on_launch = [this](const fake::Launch& launch, const void* params) {
      wrong_ += device::launch(GetParam(), launch.kernel, launch.grid_x, params);
    };
  }
  void TearDown() override { fake::state().on_launch = nullptr; }

  /// False: the row does not take such inputs.
  bool check(const Problem& p, std::uint64_t seed) {
    const core::Kernel& row = GetParam();
    // Several tiles or items a block; of decoding also several blocks an item.
    gpu_.threads = row.form == core::Form::decode && seed % 2 == 0 ? 40 : 3;
    if (!refusal(row, p, gpu_).empty()) return false;
    tools::RunMemory memory(p, seed);
    if (p.pass == Pass::backward) tools::give_forward(memory);
    if (needs_unaligned(p, memory.tensors()) && !row.any_layout) return false;
    const PlanData plan = plan_row(row, p, gpu_);
    const std::string text = to_string(p) + " seed " + std::to_string(seed);
    // Of NaN: tiles that are not there would be seen.
    const tools::GuardedBuffer workspace(plan.workspace_bytes, 0);
    wrong_.clear();
    std::mt19937 random(static_cast<unsigned>(seed));
    std::optional<LostPage> lost;
    if (random() % 2 == 0) lost.emplace(memory, random);
    const Status status = cuda::run(plan, memory.tensors(), workspace.data(), {});
    if (lost) {
      EXPECT_TRUE(lost->intact()) << text;
      lost->find();
    }
    EXPECT_TRUE(status.ok()) << status.text << ": " << text;
    EXPECT_EQ(wrong_, "") << text;
    EXPECT_TRUE(workspace.guards_intact()) << text;
    for (const tools::Verdict& verdict : tools::judge_all(memory, name_of(row))) {
      EXPECT_TRUE(verdict.pass()) << verdict.output << ": error " << verdict.error << ", bound "
                                  << verdict.bound << ": " << text;
    }
    if (lost) lost->fill();
    EXPECT_EQ(memory.damage(), "") << text;
    const LostSequence sequence(memory, random);
    if (sequence) {
      const tools::GuardedBuffer again(plan.workspace_bytes, 0);
      EXPECT_TRUE(cuda::run(plan, memory.tensors(), again.data(), {}).ok()) << text;
      EXPECT_EQ(wrong_, "") << text;
      EXPECT_EQ(sequence.changed(), "") << text;
    }
    return true;
  }

  /// Six random problems that the row takes; of those that take long here three at least, or one
  /// if races are looked for.
  void check_some(std::string (*random_problem)(const core::Kernel& row, std::mt19937& random)) {
    const unsigned seed = std::random_device()();
    std::mt19937 random(seed);
    const auto start = std::chrono::steady_clock::now();
    const auto takes_long = [&start] {
      return std::chrono::steady_clock::now() - start > std::chrono::seconds(4);
    };
    constexpr int kLeast = kSeesRaces ? 1 : 3;
    int ran = 0;
    for (int trial = 0; trial < 60 && ran < 6 && (ran < kLeast || !takes_long()); ++trial) {
      const Result<Problem> p = parse_problem(random_problem(GetParam(), random));
      ASSERT_TRUE(p.ok()) << p.status().text;
      ran += check(*p, random()) ? 1 : 0;
    }
    EXPECT_GE(ran, kLeast) << "seed " << seed;
  }

  cuda::FakeCode code_;
  Device gpu_;
  std::string wrong_;
};

inline std::string one_of(std::mt19937& random, std::initializer_list<const char*> texts) {
  return *(texts.begin() + static_cast<std::ptrdiff_t>(random() % texts.size()));
}

inline std::string row_name(const testing::TestParamInfo<core::Kernel>& info) {
  std::string name = name_of(info.param);
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

}  // namespace tessera::device
