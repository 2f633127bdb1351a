// What a forward run enqueues besides its kernel, and what its tensor maps ask for, on the fake
// driver.
#include <cstddef>
#include <cstdint>
#include <memory>
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
  /// Its workspace is full of something else.
  Status run_once(const char* text) {
    const Problem problem = problem_of(text);
    const Result<Plan> planned = plan(problem, gpu_);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    filled_.assign(planned->workspace_bytes() / 4 + 16, 77);
    void* aligned = filled_.data();
    std::size_t room = filled_.size() * sizeof(std::int32_t);
    EXPECT_NE(std::align(Plan::workspace_alignment, planned->workspace_bytes(), aligned, room),
              nullptr);
    counter_ = nullptr;
    fake::state().on_launch = [this](const fake::Launch& launch, const void* params) {
      if (launch.kernel.find("forward") == std::string::npos) return;
      counter_ = static_cast<const cuda::sm90::ForwardParams*>(params)->next_tile;
      counted_ = counter_ == nullptr ? -1 : *counter_;
    };
    fake::state().enqueued.clear();
    return run(*planned, tensors_of(problem), aligned, planned->workspace_bytes(),
               {.stream = &stream_});
  }
  Enqueued enqueued(const char* text) {
    const Status status = run_once(text);
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
  const Status status = run_once("fwd bf16 b=9 h=16 q=1000 k=1000 d=128 packed=5000,5000");
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
