// What a forward run enqueues besides its kernel, and what its tensor maps ask for, on the fake
// driver.
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/launches.h"
#include "cuda/sm90/forward_params.h"

namespace tessera {
namespace {

using Enqueued = std::vector<std::pair<std::string, void*>>;

class ForwardLaunches : public Launches {
 protected:
  /// Of a run whose workspace is full of something else.
  Enqueued enqueued(const char* text) {
    const Problem problem = problem_of(text);
    const Result<Plan> planned = plan(problem, gpu_);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    const std::vector<std::int32_t> before(planned->workspace_bytes() / 4 + 16, 77);
    filled_ = before;
    const auto aligned = reinterpret_cast<std::uintptr_t>(filled_.data() + 15) / 64 * 64;
    counter_ = nullptr;
    fake::state().on_launch = [this](const fake::Launch& launch, const void* params) {
      if (launch.kernel.find("forward") == std::string::npos) return;
      counter_ = static_cast<const cuda::sm90::ForwardParams*>(params)->next_tile;
      counted_ = counter_ == nullptr ? -1 : *counter_;
    };
    fake::state().enqueued.clear();
    const Status status = run(*planned, tensors_of(problem), reinterpret_cast<void*>(aligned),
                              planned->workspace_bytes(), {.stream = &stream_});
    EXPECT_TRUE(status) << status.text;
    return fake::state().enqueued;
  }

  char stream_ = 0;
  std::vector<std::int32_t> filled_;
  const std::int32_t* counter_ = nullptr;
  std::int32_t counted_ = -1;
};

// A counter is 0 when the kernel begins, on its stream; other kernels know their tiles.
TEST_F(ForwardLaunches, TilesOfUnknownLengthHaveACounter) {
  EXPECT_EQ(enqueued("fwd bf16 b=9 h=16 q=1000 k=1000 d=128 packed=5000,5000"),
            (Enqueued{{"cuMemsetD32Async", &stream_}, {"cuLaunchKernelEx", &stream_}}));
  EXPECT_NE(counter_, nullptr);
  EXPECT_EQ(counted_, 0);
  EXPECT_EQ(enqueued("fwd bf16 b=9 h=16 q=1000 k=1000 d=128"),
            (Enqueued{{"cuLaunchKernelEx", &stream_}}));
  EXPECT_EQ(counter_, nullptr);
  fake::state().failures["cuMemsetD32Async"] = 1;
  const Problem problem = problem_of("fwd bf16 b=9 h=16 q=1000 k=1000 d=128 packed=5000,5000");
  const Result<Plan> planned = plan(problem, gpu_);
  ASSERT_TRUE(planned.ok());
  fake::state().enqueued.clear();
  const Status status = run(*planned, tensors_of(problem), filled_.data(),
                            planned->workspace_bytes(), {.stream = &stream_});
  EXPECT_EQ(status.code, Code::device);
  EXPECT_EQ(fake::state().enqueued.size(), 1U);  // no kernel
}

// Of rows that begin inside a line of 128 bytes no more than that line is fetched ahead.
TEST_F(ForwardLaunches, LinesThatRowsShareAreNotFetchedAhead) {
  const auto promotions = [&](const char* text) {
    fake::state().promotions.clear();
    static_cast<void>(enqueued(text));
    return fake::state().promotions;
  };
  constexpr int k128 = cuda::kMapPromoteL2To128, k256 = cuda::kMapPromoteL2To256;
  EXPECT_EQ(promotions("fwd bf16 h=16 q=200 k=200 d=72"), (std::vector{k128, k128, k128}));
  EXPECT_EQ(promotions("fwd bf16 h=16 q=200 k=200 d=80"), (std::vector{k128, k128, k128}));
  EXPECT_EQ(promotions("fwd bf16 h=16 q=200 k=200 d=128"), (std::vector{k256, k256, k256}));
  EXPECT_EQ(promotions("fwd bf16 h=16 q=200 k=200 d=64"), (std::vector{k256, k256, k256}));
  EXPECT_EQ(promotions("fwd bf16 h=16 q=200 k=200 d=128/72"), (std::vector{k256, k256, k128}));
}

}  // namespace
}  // namespace tessera
