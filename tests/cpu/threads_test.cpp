// The executors: every worker index is run exactly once, whoever calls, and an idle pool sleeps.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "cpu/detect.h"
#include "tessera/device.hpp"
#include "tessera/executor.hpp"

namespace tessera {
namespace {

/// Counts the calls of every worker index. Plain integers: the executor alone must order the
/// accesses, which ThreadSanitizer checks.
struct Counts {
  explicit Counts(int num_workers) : calls(static_cast<std::size_t>(num_workers)) {}

  static void work(void* context, int worker) {
    ++static_cast<Counts*>(context)->calls[static_cast<std::size_t>(worker)];
  }
  void run_on(const Executor& executor) {
    executor.run(executor.self, static_cast<int>(calls.size()), work, this);
  }
  bool all_equal(int count) const {
    for (const int c : calls) {
      if (c != count) return false;
    }
    return true;
  }

  std::vector<int> calls;
};

TEST(Threads, EveryWorkerRunsOnce) {
  for (const int num_threads : {1, 2, 3, 7}) {
    ThreadPool pool(num_threads);
    const Executor executor = pool.executor();
    EXPECT_EQ(executor.num_threads, num_threads);
    for (const int num_workers : {0, 1, 2, 3, 7, 8, 100}) {
      Counts counts(num_workers);
      for (int repeat = 1; repeat <= 20; ++repeat) {
        counts.run_on(executor);
        ASSERT_TRUE(counts.all_equal(repeat)) << num_threads << " threads, " << num_workers;
      }
    }
  }
}

TEST(Threads, WakesAfterSleep) {
  ThreadPool pool(3);
  Counts counts(3);
  for (int repeat = 1; repeat <= 20; ++repeat) {
    std::this_thread::sleep_for(std::chrono::microseconds(repeat * 20));
    counts.run_on(pool.executor());
    ASSERT_TRUE(counts.all_equal(repeat));
  }
}

TEST(Threads, WorkersReallyRunAtOnce) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  const auto meet = [](void* context, int) {
    auto& count = *static_cast<std::atomic<int>*>(context);
    count.fetch_add(1);
    while (count.load() < 2) std::this_thread::yield();  // hangs if one thread did both
  };
  const Executor executor = pool.executor();
  executor.run(executor.self, 2, meet, &arrived);
  EXPECT_EQ(arrived.load(), 2);
}

TEST(Threads, NestedCallRunsInline) {
  ThreadPool pool(3);
  struct Outer {
    Executor executor;
    std::vector<Counts> inner;
  } outer{pool.executor(), std::vector<Counts>(3, Counts(5))};
  const auto work = [](void* context, int worker) {
    auto& o = *static_cast<Outer*>(context);
    o.inner[static_cast<std::size_t>(worker)].run_on(o.executor);
  };
  outer.executor.run(outer.executor.self, 3, work, &outer);
  for (const Counts& counts : outer.inner) EXPECT_TRUE(counts.all_equal(1));
}

TEST(Threads, ConcurrentCallersAreAllServed) {
  ThreadPool pool(3);
  const Executor executor = pool.executor();
  std::vector<Counts> counts(4, Counts(3));
  std::vector<std::thread> callers;
  for (Counts& mine : counts) {
    callers.emplace_back([&mine, executor] {
      for (int repeat = 0; repeat < 500; ++repeat) mine.run_on(executor);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const Counts& mine : counts) EXPECT_TRUE(mine.all_equal(500));
}

TEST(Threads, IdlePoolUsesNoCpu) {
  ThreadPool pool(4);
  Counts(4).run_on(pool.executor());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const double seconds = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 0.02);
}

TEST(Threads, PoolsComeAndGo) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    ThreadPool pool(3);
    if (repeat % 2 == 0) continue;  // never used
    Counts counts(3);
    counts.run_on(pool.executor());
    EXPECT_TRUE(counts.all_equal(1));
  }
}

TEST(Threads, DefaultSizeHonoursTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(cpu::usable_threads(), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(cpu::usable_threads(), 1);
  EXPECT_EQ(ThreadPool().executor().num_threads, 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST(Threads, ForkedChildRunsInline) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow a fork of a process with threads";
#else
  ThreadPool pool(3);
  Counts counts(3);
  counts.run_on(pool.executor());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    counts.run_on(pool.executor());
    {
      ThreadPool own(2);
      counts.run_on(own.executor());
    }
    _exit(counts.all_equal(3) ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
#endif
}

TEST(Threads, InlineExecutorRunsInOrderHere) {
  struct Order {
    std::vector<int> workers;
    std::thread::id thread = std::this_thread::get_id();
  } order;
  const Executor executor = inline_executor();
  executor.run(
      executor.self, 3,
      [](void* context, int worker) {
        auto& o = *static_cast<Order*>(context);
        EXPECT_EQ(std::this_thread::get_id(), o.thread);
        o.workers.push_back(worker);
      },
      &order);
  EXPECT_EQ(order.workers, (std::vector<int>{0, 1, 2}));
}

TEST(Detect, ThisMachineMakesSense) {
  const Device device = this_cpu();
  EXPECT_FALSE(device.name.empty());
  EXPECT_EQ(device.arch, best_arch());
  EXPECT_LE(device.arch, cpu::machine_arch());
  EXPECT_GE(device.threads, 1);
  EXPECT_GE(device.l1_bytes, 4 << 10);
  EXPECT_GE(device.l2_bytes, device.l1_bytes);
  EXPECT_EQ(this_cpu(), device);
  EXPECT_GE(default_executor().num_threads, 1);
}

}  // namespace
}  // namespace tessera
