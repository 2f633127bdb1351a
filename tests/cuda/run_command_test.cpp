// `tessera run --device gpu` on the fake driver: files go to the device, results come back, and
// what fails on the way leaves no file.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/fake_code.h"
#include "cuda/fake_driver.h"
#include "cuda/sm90/forward_params.h"
#include "files/tensor_file.h"
#include "tessera/tessera.hpp"
#include "tools/command.h"
#include "tools/temporary_folder.h"

namespace tessera::tools {
namespace {

using Words = std::vector<std::uint16_t>;

class RunOnAGpu : public testing::Test {
 protected:
  /// Two sequences of 7 and 4 rows, two heads; the row that takes head_dim 20 reads by address.
  static constexpr std::int64_t kRows = 11, kHeads = 2, kDim = 20;
  static constexpr std::size_t kCount = kRows * kHeads * kDim;

  void SetUp() override {
    fake::state() = {};
    if (!cuda::FakeCode::is_possible()) GTEST_SKIP() << "a build without CUDA";
    std::mt19937 random(std::random_device{}());
    for (const char* name : {"q", "k", "v"}) {
      Words& words = inputs_.emplace_back(kCount);
      for (std::uint16_t& word : words) word = static_cast<std::uint16_t>(random());
      write(name, {kRows, kHeads, kDim}, Element::f16, words.data());
    }
    write("bias", {kHeads, 1, 7}, Element::f32, bias_);
    write("sink", {kHeads}, Element::f32, sink_);
    write("offsets", {3}, Element::i32, offsets_);
  }
  void TearDown() override { fake::state().on_launch = nullptr; }

  void write(const std::string& name, const std::vector<std::int64_t>& shape, Element element,
             const void* data) const {
    const std::vector<NamedTensor> tensors = {{name, element, shape, data}};
    const Status status = write_tensors(file(name), tensors);
    ASSERT_TRUE(status.ok()) << status.text;
  }

  std::string file(const std::string& name) const { return folder_ / (name + ".npy"); }

  Ran run() const {
    return tessera({"run",           "-q",
                    file("q"),       "-k",
                    file("k"),       "-v",
                    file("v"),       "--bias",
                    file("bias"),    "--sink",
                    file("sink"),    "--cu-seqlens-q",
                    file("offsets"), "--cu-seqlens-k",
                    file("offsets"), "-o",
                    file("o"),       "--lse",
                    file("lse"),     "--device",
                    "gpu:1",         "--quiet"});
  }

  template <class T>
  std::vector<T> read(const std::string& name) const {
    const Result<FileTensor> tensor = read_tensor(file(name));
    EXPECT_TRUE(tensor.ok()) << tensor.status().text;
    if (!tensor) return {};
    const T* const data = static_cast<const T*>(tensor->data);
    return std::vector<T>(data, data + tensor->count());
  }

  cuda::FakeCode code_;
  TemporaryFolder folder_;
  std::vector<Words> inputs_;
  const float bias_[14] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
  const float sink_[2] = {0.25F, -3.0F};
  const std::int32_t offsets_[3] = {0, 7, 11};
};

/// The kernel finds on its device what the files hold, and what it writes there is in the results.
TEST_F(RunOnAGpu, FilesGoThereAndResultsComeBack) {
  fake::state().on_launch = [&](const fake::Launch& launch, const void* parameters) {
    const auto& p = *static_cast<const cuda::sm90::ForwardParams*>(parameters);
    EXPECT_EQ(launch.kernel, "tessera_sm90_forward_f16_d64_128x64_any");
    EXPECT_EQ(launch.context, fake::context_of(1));
    const void* const sources[] = {p.q_source.data, p.k_source.data, p.v_source.data};
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(std::memcmp(sources[i], inputs_[i].data(), 2 * kCount), 0) << i;
    }
    EXPECT_EQ(std::memcmp(p.extras.bias, bias_, sizeof bias_), 0);
    EXPECT_EQ(std::memcmp(p.sink, sink_, sizeof sink_), 0);
    EXPECT_EQ(std::memcmp(p.sequences.cu_seqlens_q, offsets_, sizeof offsets_), 0);
    EXPECT_EQ(std::memcmp(p.sequences.cu_seqlens_k, offsets_, sizeof offsets_), 0);
    auto* const o = static_cast<std::uint16_t*>(p.o);
    std::iota(o, o + kCount, std::uint16_t{100});
    std::iota(p.softmax_lse, p.softmax_lse + kRows * kHeads, 0.5F);
  };
  const Ran ran = run();
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  Words o(kCount);
  std::iota(o.begin(), o.end(), std::uint16_t{100});
  std::vector<float> lse(kRows * kHeads);
  std::iota(lse.begin(), lse.end(), 0.5F);
  EXPECT_EQ(read<std::uint16_t>("o"), o);
  EXPECT_EQ(read<float>("lse"), lse);
  EXPECT_EQ(fake::state().launches.size(), 1U);
  EXPECT_EQ(fake::state().calls["cuStreamSynchronize"], 1);
  EXPECT_EQ(fake::state().calls["cuMemcpyHtoD"], 7);
  EXPECT_EQ(fake::state().calls["cuMemcpyDtoH"], 2);
  EXPECT_EQ(fake::state().calls["cuMemAlloc"], fake::state().calls["cuMemFree"]);
}

/// Whatever the driver refuses is the command's failure, with the driver's words and without a
/// file.
TEST_F(RunOnAGpu, AFailureLeavesNoFile) {
  for (const char* call :
       {"cuMemAlloc", "cuMemcpyHtoD", "cuLaunchKernelEx", "cuStreamSynchronize", "cuMemcpyDtoH"}) {
    fake::state().failures = {{call, 700}};
    const Ran ran = run();
    EXPECT_EQ(ran.code, kCannot) << call;
    EXPECT_NE(ran.err.find(call), std::string::npos) << ran.err;
    EXPECT_FALSE(std::filesystem::exists(file("o"))) << call;
    EXPECT_FALSE(std::filesystem::exists(file("lse"))) << call;
  }
  fake::state().failures.clear();
  EXPECT_EQ(tessera({"run", "-q", file("q"), "-k", file("k"), "-v", file("v"), "-o", file("o"),
                     "--device", "gpu", "--threads", "2"})
                .code,
            kBadInput);
}

/// Without a name the device is the GPU, but not for what its rows refuse, nor where this build has
/// no code of them, nor where threads are counted.
TEST(DefaultDevice, IsTheGpuIfItCan) {
  const cuda::FakeCode code;
  fake::state() = {};
  const auto planned = [](std::vector<std::string> words) {
    words.insert(words.begin(), "plan");
    return tessera(words).out;
  };
  const auto on_gpu = [&](const std::vector<std::string>& words) {
    return planned(words).find("device     Fake H200") != std::string::npos;
  };
  EXPECT_EQ(on_gpu({"fwd bf16 h=2 q=8 k=8 d=64"}), cuda::FakeCode::is_possible());
  EXPECT_TRUE(on_gpu({"fwd bf16 h=2 q=8 k=8 d=64", "--device", "gpu"}));
  EXPECT_FALSE(on_gpu({"fwd f32 h=2 q=8 k=8 d=64"}));
  EXPECT_FALSE(on_gpu({"fwd bf16 h=2 q=8 k=8 d=64", "--threads", "2"}));
}

}  // namespace
}  // namespace tessera::tools
