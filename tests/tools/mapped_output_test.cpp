// Results that are computed where they are stored: the bytes come back, nothing is left of what was
// not committed, a full disk is one error before any work, and `tessera run` writes more than it
// may allocate.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cli.h"
#include "files/output_file.h"
#include "files/tensor_file.h"
#include "tools/temporary_folder.h"

namespace tessera::tools {
namespace {

using std::string;

string random_bytes(std::mt19937& random, std::uint64_t size) {
  string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() % 256);
  return bytes;
}

/// What waitpid() says of a child process that runs `body` and exits with its result.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int state = 0;
  EXPECT_EQ(waitpid(child, &state, 0), child);
  return state;
}

/// Both kinds: the unnamed file and the hidden neighbour.
class Output : public testing::TestWithParam<bool> {
 protected:
  Result<OutputFile> create(const string& path, std::uint64_t size) const {
    return OutputFile::create(path, size, GetParam());
  }

  TemporaryFolder folder_;
  unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
};

TEST_P(Output, BytesComeBack) {
  const std::uint64_t any = 1 + random_() % 100'000;
  for (const std::uint64_t size : {std::uint64_t{1}, any, any / 4096 * 4096 + 4096}) {
    const string path = folder_ / "o.bin";
    const string bytes = random_bytes(random_, size);
    auto file = create(path, size);
    ASSERT_TRUE(file.ok()) << file.status().text;
    ASSERT_EQ(file->bytes().size(), size);
    EXPECT_TRUE(std::ranges::all_of(file->bytes(), [](std::byte b) { return b == std::byte{}; }));
    std::memcpy(file->bytes().data(), bytes.data(), size);
    const OutputFile moved = std::move(*file);
    EXPECT_TRUE(file->bytes().empty());
    ASSERT_TRUE(const_cast<OutputFile&>(moved).commit().ok());
    EXPECT_EQ(bytes_of(path), bytes) << "seed " << seed_;
    EXPECT_EQ(folder_.size(), 1);
  }
}

TEST_P(Output, WithoutCommitNothingHappened) {
  const string path = folder_.file("o.bin", "old");
  {
    const auto file = create(path, 5000);
    ASSERT_TRUE(file.ok()) << file.status().text;
    std::memset(file->bytes().data(), 'x', 5000);
    EXPECT_EQ(bytes_of(path), "old");
    if (!GetParam()) {
      EXPECT_EQ(folder_.size(), 2);
    }
  }
  EXPECT_EQ(bytes_of(path), "old");
  EXPECT_EQ(folder_.size(), 1);
  {
    const auto file = create(folder_ / "new.bin", 1);
  }
  EXPECT_EQ(folder_.size(), 1);
}

TEST_P(Output, FailedCommitLeavesNothing) {
  const string path = folder_ / "o.bin";
  {
    auto file = create(path, 5000);
    ASSERT_TRUE(file.ok()) << file.status().text;
    std::filesystem::create_directory(path);  // a folder cannot be replaced
    const Status status = file->commit();
    EXPECT_EQ(status.code, Code::device);
    EXPECT_TRUE(status.text.starts_with("cannot be put in place: ")) << status.text;
  }
  EXPECT_TRUE(std::filesystem::is_directory(path));
  EXPECT_EQ(folder_.size(), 1);
}

TEST_P(Output, LargerThanAnyFileIsAnError) {
  for (const std::uint64_t size : {std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    const auto file = create(folder_ / "o.bin", size);
    EXPECT_EQ(file.status().text,
              "cannot be made " + std::to_string(size) + " bytes long: File too large");
  }
  EXPECT_EQ(folder_.size(), 0);
}

/// On a file system of 64 KiB, in a mount namespace of its own where that is permitted.
TEST_P(Output, FullDiskIsAnErrorBeforeAnyWork) {
  constexpr int kSkipped = 100;
  const int state = in_child([&] {
    const string disk = folder_ / "";
    if (unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) != 0 ||
        mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=64k") != 0) {
      return kSkipped;
    }
    const string path = folder_.file("o.bin", "old");
    if (!create(path, 10'000).ok()) return 1;
    const string said = create(path, 100'000).status().text;
    if (said != "cannot be made 100000 bytes long: No space left on device") return 2;
    if (bytes_of(path) != "old" || folder_.size() != 1) return 3;
    return create(path, 50'000)->commit().ok() && bytes_of(path).size() == 50'000 ? 0 : 4;
  });
  ASSERT_TRUE(WIFEXITED(state));
  if (WEXITSTATUS(state) == kSkipped) GTEST_SKIP() << "may not mount a small file system";
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

INSTANTIATE_TEST_SUITE_P(Files, Output, testing::Bool(),
                         [](const auto& kind) { return string(kind.param ? "unnamed" : "named"); });

TEST(UnnamedOutput, KilledProcessLeavesNothing) {
  const TemporaryFolder folder;
  int unnamed = 0;
  {
    const auto file = OutputFile::create(folder / "o.bin", 1);
    unnamed = folder.size() == 0;
  }
  if (unnamed == 0) GTEST_SKIP() << "this file system has no unnamed files";
  const int state = in_child([&] {
    const auto file = OutputFile::create(folder / "o.bin", 100'000);
    std::memset(file->bytes().data(), 'x', 100'000);
    return raise(SIGKILL);
  });
  EXPECT_TRUE(WIFSIGNALED(state));
  EXPECT_EQ(folder.size(), 0);
}

TEST(TensorOutput, RandomTensorsComeBack) {
  constexpr Element kElements[] = {Element::f16, Element::bf16, Element::f32,
                                   Element::f64, Element::i32,  Element::i64};
  const TemporaryFolder folder;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int trial = 0; trial < 60; ++trial) {
    const bool npy = trial % 2 == 0;
    const string path = folder / (npy ? "t.npy" : "t.safetensors");
    std::vector<TensorSpec> specs;
    std::vector<string> bytes;
    for (std::size_t count = npy ? 1 : 1 + random() % 5; specs.size() < count;) {
      const Element element = kElements[random() % std::size(kElements)];
      std::vector<std::int64_t> shape(random() % 5);
      std::uint64_t size = size_of(element);
      for (std::int64_t& n : shape) {
        n = random() % 10 == 0 ? 0 : 1 + static_cast<std::int64_t>(random() % 9);
        size *= static_cast<std::uint64_t>(n);
      }
      specs.push_back({"t" + std::to_string(specs.size()), element, shape});
      bytes.push_back(random_bytes(random, size));
    }
    auto output = TensorOutput::create(path, specs);
    ASSERT_TRUE(output.ok()) << output.status().text;
    std::uintptr_t first = ~std::uintptr_t{0};
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const auto address = reinterpret_cast<std::uintptr_t>(output->data(i));
      EXPECT_EQ(address % size_of(specs[i].element), 0U);
      first = std::min(first, address);
      ASSERT_NE(output->data(i), nullptr);
      std::memcpy(output->data(i), bytes[i].data(), bytes[i].size());
    }
    EXPECT_EQ(first % 64, 0U);
    const Status status = output->commit();
    ASSERT_TRUE(status.ok()) << status.text;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const auto back = read_tensor(npy ? path : path + ":" + specs[i].name, TwoBytes::bf16);
      ASSERT_TRUE(back.ok()) << back.status().text;
      EXPECT_EQ(back->element, specs[i].element);
      EXPECT_EQ(back->shape, specs[i].shape);
      EXPECT_EQ(std::memcmp(back->data, bytes[i].data(), bytes[i].size()), 0);
    }
  }
  EXPECT_EQ(folder.size(), 2);
}

TEST(TensorOutput, ErrorsBeginWithThePath) {
  const TemporaryFolder folder;
  const TensorSpec huge{"a", Element::f32, {std::int64_t{1} << 59}};
  const string path = folder / "o.safetensors";
  const auto error = [&](const std::vector<TensorSpec>& specs) {
    return TensorOutput::create(path, specs).status().text;
  };
  // Each alone has a legal size; their sum has not.
  EXPECT_EQ(error({huge, {"b", Element::f32, huge.shape}, {"c", Element::i32, huge.shape}}),
            path + ": cannot be written: tensor 'c' has the shape (576460752303423488,)");
  EXPECT_TRUE(TensorOutput::create(folder / "no/o.npy", {&huge, 1})
                  .status()
                  .text.starts_with(folder / "no/o.npy: cannot be created: "));
  EXPECT_EQ(folder.size(), 0);
}

/// `tessera run` on files in a folder of its own.
class Run : public testing::Test {
 protected:
  void write(const string& name, const std::vector<std::int64_t>& shape, std::span<const float> x) {
    const NamedTensor tensor{"", Element::f32, shape, x.data()};
    const Status status = write_tensors(folder_ / name, {&tensor, 1});
    ASSERT_TRUE(status.ok()) << status.text;
  }

  std::vector<float> normal(std::size_t count) {
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& value : values) value = distribution(random_);
    return values;
  }

  /// The exit code of a run over q.npy, k.npy and v.npy with these words added.
  int run(const std::vector<string>& more) const {
    std::vector<string> words = {"tessera",         "run", "--quiet",         "-q",
                                 folder_ / "q.npy", "-k",  folder_ / "k.npy", "-v",
                                 folder_ / "v.npy"};
    words.insert(words.end(), more.begin(), more.end());
    std::vector<const char*> argv;
    for (const string& word : words) argv.push_back(word.c_str());
    return run_cli(static_cast<int>(argv.size()), argv.data());
  }

  TemporaryFolder folder_;
  unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
};

/// One key: o is v, softmax_lse the only score. The limit counts what a process allocates, but not
/// what it maps from files.
TEST_F(Run, WritesMoreThanItMayAllocate) {
  constexpr std::int64_t kRows = 1 << 15, kHeads = 4, kDim = 128;  // o: 64 MiB
  constexpr std::uint64_t kAllowed = std::uint64_t{24} << 20;
  std::uint64_t data_kib = 0;
  std::ifstream status("/proc/self/status");
  for (string line; std::getline(status, line);) {
    if (line.starts_with("VmData:")) data_kib = std::stoull(line.substr(7));
  }
  if (data_kib == 0) GTEST_SKIP() << "this system does not say what is allocated";
  write("q.npy", {kRows, kHeads, 1}, normal(kRows * kHeads));
  const std::vector<float> v = normal(kDim);
  write("k.npy", {1, 1, 1}, std::vector{2.0F});
  write("v.npy", {1, 1, kDim}, v);
  for (const bool both : {true, false}) {
    SCOPED_TRACE("seed " + std::to_string(seed_));
    const string out = folder_ / (both ? "out.safetensors" : "o.npy");
    const string lse = both ? out + ":softmax_lse" : folder_ / "lse.npy";
    const int state = in_child([&] {
      rlimit limit{};
      getrlimit(RLIMIT_DATA, &limit);
      limit.rlim_cur = data_kib * 1024 + kAllowed;
      if (setrlimit(RLIMIT_DATA, &limit) != 0) return 100;
      std::vector<string> words = {"-o", out, "--threads", "1"};
      if (!both) words.insert(words.end(), {"--lse", lse});
      return run(words);
    });
    ASSERT_TRUE(WIFEXITED(state));
    ASSERT_EQ(WEXITSTATUS(state), 0);
    const auto o_file = read_tensor(both ? out + ":o" : out);
    const auto lse_file = read_tensor(lse);
    const auto q_file = read_tensor(folder_ / "q.npy");
    ASSERT_TRUE(o_file.ok() && lse_file.ok()) << o_file.status().text << lse_file.status().text;
    ASSERT_EQ(o_file->shape, (std::vector<std::int64_t>{kRows, kHeads, kDim}));
    ASSERT_EQ(lse_file->shape, (std::vector<std::int64_t>{1, kHeads, kRows}));
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const auto* o = static_cast<const float*>(o_file->data) + (row * kHeads + head) * kDim;
        for (std::size_t c = 0; c < v.size(); ++c) ASSERT_FLOAT_EQ(o[c], v[c]);
        ASSERT_NEAR(static_cast<const float*>(lse_file->data)[head * kRows + row],
                    2 * static_cast<const float*>(q_file->data)[row * kHeads + head], 1e-4);
      }
    }
  }
}

TEST_F(Run, ZeroSizedResults) {
  write("k.npy", {2, 5, 1, 8}, normal(80));
  write("v.npy", {2, 5, 1, 3}, normal(30));
  write("q.npy", {2, 0, 2, 8}, {});
  const string both = folder_ / "both.safetensors";
  ASSERT_EQ(run({"-o", both}), 0);
  EXPECT_EQ(read_tensor(both + ":o")->shape, (std::vector<std::int64_t>{2, 0, 2, 3}));
  EXPECT_EQ(read_tensor(both + ":softmax_lse")->shape, (std::vector<std::int64_t>{2, 2, 0}));
  ASSERT_EQ(run({"-o", folder_ / "o.npy", "--lse", folder_ / "lse.npy"}), 0);
  EXPECT_EQ(read_tensor(folder_ / "o.npy")->shape, (std::vector<std::int64_t>{2, 0, 2, 3}));
  EXPECT_EQ(read_tensor(folder_ / "lse.npy")->shape, (std::vector<std::int64_t>{2, 2, 0}));
}

/// S4: no key at all gives o = 0 and softmax_lse = -inf, also over the file that was there.
TEST_F(Run, NoKeys) {
  write("q.npy", {3, 2, 8}, normal(48));
  write("k.npy", {0, 1, 8}, {});
  write("v.npy", {0, 1, 8}, {});
  folder_.file("o.npy", string(1000, 'x'));
  ASSERT_EQ(run({"-o", folder_ / "o.npy", "--lse", folder_ / "lse.npy"}), 0);
  const auto o = read_tensor(folder_ / "o.npy");
  const auto lse = read_tensor(folder_ / "lse.npy");
  ASSERT_TRUE(o.ok() && lse.ok());
  for (std::size_t i = 0; i < 48; ++i) EXPECT_EQ(static_cast<const float*>(o->data)[i], 0.0F);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(static_cast<const float*>(lse->data)[i], -INFINITY);
  }
}

TEST_F(Run, FailureLeavesEveryFileAsItWas) {
  for (const char* name : {"q.npy", "k.npy", "v.npy"}) write(name, {7, 2, 8}, normal(112));
  const string o = folder_.file("o.npy", "old o");
  const string lse = folder_.file("lse.npy", "old lse");
  const auto before = folder_.size();
  const auto fails_with = [&](const std::vector<string>& words, const string& expected) {
    testing::internal::CaptureStderr();
    EXPECT_NE(run(words), 0);
    const string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find(expected), string::npos) << said;
    EXPECT_EQ(bytes_of(o), "old o");
    EXPECT_EQ(bytes_of(lse), "old lse");
    EXPECT_EQ(folder_.size(), before);
  };
  fails_with({"-o", o, "--lse", folder_ / "no/lse.npy"}, "no/lse.npy: cannot be created");
  fails_with({"-o", o, "--lse", "/dev/null"}, "/dev/null");
  fails_with({"-o", o, "--lse", o}, "--out and --lse both name");
  fails_with({"-o", o, "--lse", lse, "--softcap", "-1"}, "softcap = -1");
}

}  // namespace
}  // namespace tessera::tools
