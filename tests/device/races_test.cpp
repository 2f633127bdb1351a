// Races are seen (./dev test --races): kernels of a few lines, with what orders their threads and
// without it.
#include "races.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "fibers.h"

namespace tessera::device {
namespace {

constexpr unsigned kThreads = 64;
constexpr int kRaces = 66;  // how the thread sanitizer ends a process that had some

class Races : public testing::Test {
 protected:
  void SetUp() override {
    if (!kSeesRaces) GTEST_SKIP() << "this build is not one for the thread sanitizer";
  }
};

using Step = std::function<void(int* words)>;

/// Runs a block's threads through these steps in a process of its own, which ends here.
[[noreturn]] void end_after(const Step& first, const Step& between, const Step& last) {
  const std::string wrong = run(1, kThreads, kThreads * sizeof(int), [&](char* shared) {
    int* const words = reinterpret_cast<int*>(shared);
    first(words);
    between(words);
    last(words);
  });
  std::exit(wrong.empty() ? 0 : 1);
}

void write_own(int* words) { words[thread()] = 1; }
void read_next_warps(const int* words) {
  [[maybe_unused]] const volatile int read = words[(thread() + kWarp) % kThreads];
}
void read_neighbours(const int* words) {
  [[maybe_unused]] const volatile int read = words[thread() ^ 1];
}
void nothing(int* /*words*/) {}
void meet_block(int* /*words*/) { meet(block().all, kThreads); }
void meet_warp(int* /*words*/) { meet(block().warps[thread() / kWarp], kWarp); }
/// As a shuffle: lanes wait for each other, and no memory is in order.
void show(int* /*words*/) { meet(block().warps[thread() / kWarp], kWarp, false); }

TEST_F(Races, WhatABarrierOrdersIsNone) {
  EXPECT_EXIT(end_after(write_own, meet_block, read_next_warps), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(end_after(write_own, meet_warp, read_neighbours), testing::ExitedWithCode(0), "");
}

TEST_F(Races, WithoutABarrierThereIsOne) {
  EXPECT_EXIT(end_after(write_own, nothing, read_next_warps), testing::ExitedWithCode(kRaces),
              "data race");
  EXPECT_EXIT(end_after(write_own, nothing, read_neighbours), testing::ExitedWithCode(kRaces),
              "data race");
}

TEST_F(Races, ABarrierOfTheWarpOrdersNoOtherWarps) {
  EXPECT_EXIT(end_after(write_own, meet_warp, read_next_warps), testing::ExitedWithCode(kRaces),
              "data race");
}

TEST_F(Races, AShuffleOrdersNothing) {
  EXPECT_EXIT(end_after(write_own, show, read_neighbours), testing::ExitedWithCode(kRaces),
              "data race");
}

// The first thread is at the second barrier, and has written, before all others leave the first.
TEST_F(Races, ABarrierOrdersNothingThatComesAfterIt) {
  const Step touch = [](int* words) {
    if (thread() == 0) {
      words[0] = 1;
    } else {
      [[maybe_unused]] const volatile int read = words[0];
    }
  };
  EXPECT_EXIT(end_after(meet_block, touch, meet_block), testing::ExitedWithCode(kRaces),
              "data race");
}

}  // namespace
}  // namespace tessera::device
