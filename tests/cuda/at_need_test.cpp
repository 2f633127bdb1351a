// Code that is compiled when it is needed: which NVRTC, what is kept of it, and what a launch makes
// of it on the fake driver.
#include "cuda/compiler/at_need.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "cuda/code.h"
#include "cuda/compiler/code_cache.h"
#include "cuda/compiler/device_headers.h"
#include "cuda/compiler/find_nvrtc.h"
#include "cuda/cubins.h"
#include "cuda/environment.h"
#include "cuda/launches.h"
#include "plan/catalog.h"
#include "tools/temporary_folder.h"

namespace tessera::cuda {
namespace {

/// Names that a text includes.
std::vector<std::string> includes_of(std::string_view text) {
  constexpr std::string_view kWord = "#include ";
  std::vector<std::string> names;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view line = text.substr(at, text.find('\n', at) - at);
    at += line.size() + 1;
    if (!line.starts_with(kWord)) continue;
    const std::string_view name = line.substr(kWord.size() + 1);
    names.emplace_back(name.substr(0, name.find_first_of("\">")));
  }
  return names;
}

// What any program includes, directly or not, is inside the library, and nothing else is.
TEST(DeviceHeaders, AreWhatProgramsInclude) {
  if (device_headers().empty()) GTEST_SKIP() << "a build without CUDA";
  std::set<std::string> wanted;
  std::vector<std::string> left;
  for (const Program& program : programs()) {
    for (const std::string& name : includes_of(program.text)) left.push_back(name);
  }
  while (!left.empty()) {
    const std::string name = left.back();
    left.pop_back();
    if (!wanted.insert(name).second) continue;
    const auto headers = device_headers();
    const auto found = std::find_if(headers.begin(), headers.end(),
                                    [&](const DeviceHeader& one) { return name == one.name; });
    ASSERT_NE(found, headers.end()) << name;
    for (const std::string& more : includes_of({found->begin, found->end})) left.push_back(more);
  }
  for (const DeviceHeader& one : device_headers()) {
    EXPECT_TRUE(wanted.contains(one.name)) << one.name << ": nobody includes it";
  }
}

TEST(FindNvrtc, SaysWhatToDoWithoutOne) {
  Environment environment;
  environment.set("TESSERA_NVRTC", "/no/such/libnvrtc.so");
  const FoundNvrtc found = find_nvrtc({"sm_90a", 0});
  EXPECT_EQ(found.nvrtc, nullptr);
  EXPECT_NE(found.why.find("/no/such/libnvrtc.so"), std::string::npos) << found.why;
  EXPECT_NE(found.why.find("pip install nvidia-cuda-nvrtc"), std::string::npos) << found.why;
}

class AtNeed : public testing::Test {
 protected:
  void SetUp() override {
    environment_.set("TESSERA_NVRTC", TESSERA_NVRTC);
    environment_.set("TESSERA_CACHE_DIR", folder_ / "code");
    if (std::string(TESSERA_NVRTC).empty()) GTEST_SKIP() << "this build has found no NVRTC";
    fake::state() = {};
  }

  /// A small program that no other test has.
  static Program program(const std::string& name) {
    return {architectures()[0], "tessera_test_" + name,
            "#include \"core/hd.h\"\nextern \"C\" __global__ void tessera_test_" + name +
                "(int* to) { *to = 1; }\n"};
  }

  /// How often NVRTC was asked for it by a process of its own; -1: it got no code.
  static int compiled_elsewhere(const Program& program) {
    const pid_t child = fork();
    if (child == 0) {
      std::size_t compiled = 0;
      const Result<std::string> code = machine_code(program, 90, 0, &compiled);
      _exit(code && code->starts_with("\177ELF") ? static_cast<int>(compiled) : 99);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) < 99 ? WEXITSTATUS(status) : -1;
  }

  static CodeCache cache() { return *CodeCache::open(false); }

  tools::TemporaryFolder folder_;
  Environment environment_;
};

TEST_F(AtNeed, IsCompiledOnceForAllProcesses) {
  const Program one = program("once");
  EXPECT_EQ(compiled_elsewhere(one), 1);
  EXPECT_EQ(compiled_elsewhere(one), 0);
  ASSERT_EQ(cache().list().size(), 1U);
  EXPECT_EQ(cache().list()[0].name, "tessera_test_once");
  Program other = one;
  other.text += "// of another text\n";
  EXPECT_EQ(compiled_elsewhere(other), 1);
  EXPECT_EQ(cache().list().size(), 2U);
}

TEST_F(AtNeed, AProcessRemembersItsOwn) {
  const Program one = program("memory");
  std::size_t compiled = 0;
  const Result<std::string> first = machine_code(one, 90, 0, &compiled);
  ASSERT_TRUE(first) << first.status().text;
  EXPECT_EQ(cache().clear(), 1U);
  const Result<std::string> second = machine_code(one, 90, 0, &compiled);
  EXPECT_EQ(*second, *first);
  EXPECT_EQ(compiled, 1U);
}

TEST_F(AtNeed, WhatCannotBeKeptIsStillMade) {
  environment_.set("TESSERA_CACHE_DIR", "/proc/no/such/folder");
  const Program one = program("homeless");
  EXPECT_EQ(compiled_elsewhere(one), 1);
  EXPECT_EQ(compiled_elsewhere(one), 1);
  std::size_t compiled = 0;
  EXPECT_EQ(compile_ahead(one, 90, compiled).code, Code::device) << "it would be of no use";
}

// Without NVRTC what was kept serves, whoever made it; with another one it is made anew.
TEST_F(AtNeed, ANewNvrtcCompilesAnew) {
  const Program one = program("renewed");
  ASSERT_EQ(compiled_elsewhere(one), 1);
  environment_.set("TESSERA_NVRTC", "/no/such/libnvrtc.so");
  EXPECT_EQ(compiled_elsewhere(one), 0);
  environment_.set("TESSERA_NVRTC", TESSERA_NVRTC);
  // The file says what it was made by in plain text.
  std::string path;
  for (const auto& entry : std::filesystem::directory_iterator(cache().folder())) {
    path = entry.path();
  }
  KeptCode code;
  {
    const std::string text = tools::bytes_of(path);
    const std::size_t from = text.find("tessera " + std::string(version()));
    const std::size_t end = text.find("*to = 1; }\n") + 11;
    code = cache().read(one.symbol, text.substr(from, end - from));
  }
  ASSERT_NE(code.cubin, "");
  code.made_by = "12.0";
  ASSERT_TRUE(cache().write(one.symbol, code));
  EXPECT_EQ(compiled_elsewhere(one), 1);
  EXPECT_EQ(compiled_elsewhere(one), 0);
}

TEST_F(AtNeed, DamageIsCompiledAway) {
  const Program one = program("damaged");
  ASSERT_EQ(compiled_elsewhere(one), 1);
  for (const auto& entry : std::filesystem::directory_iterator(cache().folder())) {
    const std::string text = tools::bytes_of(entry.path());
    tools::bytes_to(entry.path(), text.substr(0, text.size() / 2));
  }
  EXPECT_EQ(compiled_elsewhere(one), 1);
  EXPECT_EQ(compiled_elsewhere(one), 0);
}

TEST_F(AtNeed, SaysWhatDoesNotCompile) {
  Program one = program("wrong");
  one.text += "this is no program";
  const Status status = machine_code(one, 90, 0).status();
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find("does not compile it"), std::string::npos) << status.text;
  EXPECT_NE(status.text.find("tessera_test_wrong.cu("), std::string::npos) << status.text;
  EXPECT_TRUE(cache().list().empty());
}

TEST_F(AtNeed, AnNvrtcMustSuitDriverAndDevice) {
  EXPECT_NE(find_nvrtc({"sm_90a", 13000}).nvrtc, nullptr);
  EXPECT_NE(find_nvrtc({"sm_90a", 14000}).nvrtc, nullptr);
  const FoundNvrtc old = find_nvrtc({"sm_90a", 12020});
  EXPECT_EQ(old.nvrtc, nullptr);
  EXPECT_NE(old.why.find("makes code for drivers of CUDA 13, and this one is of 12.2"),
            std::string::npos)
      << old.why;
  const FoundNvrtc unknown = find_nvrtc({"sm_30", 0});
  EXPECT_EQ(unknown.nvrtc, nullptr);
  EXPECT_NE(unknown.why.find("does not know sm_30"), std::string::npos) << unknown.why;
}

TEST_F(AtNeed, AddedFoldersAreLookedThrough) {
  environment_.set("TESSERA_NVRTC", "");
  const std::string file = TESSERA_NVRTC;
  add_nvrtc_folder(file.substr(0, file.rfind('/')));
  EXPECT_NE(find_nvrtc({"sm_90a", 0}).nvrtc, nullptr);
}

// The smallest program of the build stands for all: what the driver does not take is compiled.
TEST_F(AtNeed, CodeThatTheDriverDoesNotTakeIsCompiled) {
  const Program one = yardstick_program_of(*architectures()[0]);
  if (!has_code(one, 90)) GTEST_SKIP() << "this build has no machine code for Hopper";
  for (const int error : {200, 209, 218, 222}) {
    fake::state().failures["cuLibraryLoadData"] = error;
    fake::state().refuses_first_image_only = true;
    CuLibrary library = nullptr;
    const Status status = load_library(library, one, 90, nullptr);
    EXPECT_TRUE(status) << status.text;
    EXPECT_EQ(fake::state().calls["cuLibraryLoadData"], 2) << error;
    fake::state() = {};
  }
  EXPECT_EQ(cache().list().size(), 1U);
  fake::state().failures["cuLibraryLoadData"] = 700;
  CuLibrary library = nullptr;
  EXPECT_EQ(load_library(library, one, 90, nullptr).code, Code::device);
  EXPECT_EQ(fake::state().calls["cuLibraryLoadData"], 1) << "no other code would help";
}

TEST_F(AtNeed, WithoutAnyCodeBothReasonsAreSaid) {
  environment_.set("TESSERA_NVRTC", "/no/such/libnvrtc.so");
  CuLibrary library = nullptr;
  const Status absent = load_library(library, program("absent"), 90, nullptr);
  EXPECT_NE(absent.text.find(
                "tessera_test_absent: this build has no code for a GPU of 9.0 (it has none)"),
            std::string::npos);
  EXPECT_NE(absent.text.find("pip install"), std::string::npos) << absent.text;
  const Program refused = auxiliary_program_of(*architectures()[0]);
  if (!has_code(refused, 90)) return;
  fake::state().failures["cuLibraryLoadData"] = 209;
  const Status status = load_library(library, refused, 90, nullptr);
  EXPECT_NE(status.text.find("does not take the build's code"), std::string::npos) << status.text;
  EXPECT_NE(status.text.find("209"), std::string::npos) << status.text;
}

// Of what runs on any device since Ampere an H200 has no machine code: it is compiled for that very
// device, or, where nothing compiles it, the driver gets PTX.
TEST_F(AtNeed, PtxIsWhatIsLeft) {
  const Architecture& any = *architectures()[1];
  ASSERT_EQ(any.arch, Arch::sm80);
  const Program one = yardstick_program_of(any);
  EXPECT_FALSE(has_code(one, 90));
  CuLibrary library = nullptr;
  ASSERT_TRUE(load_library(library, one, 90, nullptr));
  ASSERT_EQ(cache().list().size(), 1U);
  EXPECT_EQ(fake::state().images.back().substr(0, 4), "\177ELF");
  environment_.set("TESSERA_NVRTC", "/no/such/libnvrtc.so");
  environment_.set("TESSERA_CACHE_DIR", folder_ / "other");
  const Program other =
      program_of(any, *std::find_if(kCatalog.begin(), kCatalog.end(),
                                    [](auto& r) { return r.arch == Arch::sm80; }));
  const Status status = load_library(library, other, 90, nullptr);
  const bool built = std::any_of(cubins().begin(), cubins().end(), [&](const Cubin& cubin) {
    return other.symbol == cubin.symbol && std::string_view(cubin.target) == "compute_80";
  });
  ASSERT_EQ(status.ok(), built) << status.text;
  if (!built) GTEST_SKIP() << "this build has no PTX";
  EXPECT_EQ(fake::state().images.back().substr(0, 2), "//");
  // What NVRTC made, and the driver does not take, is no reason not to try PTX.
  environment_.set("TESSERA_NVRTC", TESSERA_NVRTC);
  fake::state().failures["cuLibraryLoadData"] = 209;
  fake::state().refuses_first_image_only = true;
  EXPECT_TRUE(load_library(library, other, 90, nullptr));
  EXPECT_EQ(fake::state().images.back().substr(0, 2), "//");
  environment_.set("TESSERA_NVRTC", "/no/such/libnvrtc.so");
  environment_.set("TESSERA_CACHE_DIR", folder_ / "third");
  fake::state().refuses_first_image_only = false;
  // No machine code of 9.0 is taken for another device, and no PTX of 8.0 for an older one.
  EXPECT_FALSE(load_library(library, other, 75, nullptr));
  fake::state().failures["cuLibraryLoadData"] = 222;
  const Status old = load_library(library, other, 90, nullptr);
  EXPECT_NE(old.text.find("this driver does not take what was compiled"), std::string::npos)
      << old.text;
}

// Without NVRTC an architecture has code where what is no row of it was compiled before.
TEST_F(AtNeed, WhatIsKeptIsCode) {
  const Architecture& any = *architectures()[1];
  constexpr int kNone = 130;  // for which nothing was compiled
  const Architecture& hopper = *architectures()[0];
  environment_.set("TESSERA_NVRTC", TESSERA_FAKE_NVRTC);
  std::size_t compiled = 0;
  ASSERT_TRUE(machine_code(auxiliary_program_of(any), 90, 0, &compiled));
  EXPECT_TRUE(can_make(any, 90, 0));
  environment_.set("TESSERA_NVRTC", "/no/such/libnvrtc.so");
  EXPECT_TRUE(can_make(any, 90, 0));
  EXPECT_FALSE(can_make(any, kNone, 0));
  EXPECT_FALSE(can_make(hopper, 90, 0));
  environment_.set("TESSERA_CACHE_DIR", folder_ / "empty");
  EXPECT_FALSE(can_make(any, 90, 0));
}

TEST_F(AtNeed, NothingIsCompiledWhileAStreamIsCaptured) {
  int stream = 0;
  fake::state().captured = &stream;
  CuLibrary library = nullptr;
  const Program one = program("captured");
  const Status status = load_library(library, one, 90, reinterpret_cast<CuStream>(&stream));
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find("must be compiled first, but the stream is being captured"),
            std::string::npos)
      << status.text;
  EXPECT_TRUE(cache().list().empty());
  EXPECT_TRUE(load_library(library, one, 90, nullptr));
}

class Prepared : public Launches {
 protected:
  void SetUp() override {
    Launches::SetUp();
    if (!has_code(yardstick_program_of(*architectures()[0]), 90)) {
      GTEST_SKIP() << "this build has no machine code for Hopper";
    }
    gpu_ = *this_gpu(1);  // no other test has loaded these rows there
  }
};

TEST_F(Prepared, OldDriversLoadNothingIntoACapture) {
  int stream = 0;
  fake::state().captured = &stream;
  fake::state().driver_version = 12020;
  const Problem problem = problem_of("fwd f16 h=2 q=64 k=64 d=192 causal");
  const Status status = enqueue(problem, tensors_of(problem), &stream);
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find("call prepare()"), std::string::npos) << status.text;
  EXPECT_EQ(calls("cuLaunchKernelEx"), 0);
  const Result<Plan> planned = plan(problem, gpu_);
  ASSERT_TRUE(planned);
  const Status prepared = prepare(*planned);
  ASSERT_TRUE(prepared) << prepared.text;
  const int loaded = calls("cuLibraryLoadData");
  EXPECT_GE(loaded, 1) << "the row, and what is beside all rows";
  EXPECT_EQ(calls("cuLaunchKernelEx"), 0);
  EXPECT_TRUE(enqueue(problem, tensors_of(problem), &stream));
  EXPECT_EQ(calls("cuLibraryLoadData"), loaded);
  EXPECT_EQ(fake::state().last.context, fake::context_of(1));
}

TEST_F(Prepared, NewOnesDo) {
  int stream = 0;
  fake::state().captured = &stream;
  fake::state().driver_version = 12030;
  const Status status = enqueue("fwd f16 h=2 q=64 k=64 d=96 causal", &stream);
  EXPECT_TRUE(status) << status.text;
}

TEST(Prepare, OfACpuIsNothing) {
  const Result<Plan> planned = plan(*parse_problem("fwd f32 h=2 q=8 k=8 d=64"), this_cpu());
  ASSERT_TRUE(planned);
  EXPECT_TRUE(prepare(*planned));
  EXPECT_EQ(*compile_ahead(*planned), 0U);
}

}  // namespace
}  // namespace tessera::cuda
