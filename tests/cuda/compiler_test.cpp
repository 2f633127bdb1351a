// The part of the device compiler that library and build share: what it has against a kernel, and
// programs from source to machine code where NVRTC is there.
#include "cuda/compiler/compiler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/compiler/device_headers.h"

namespace tessera::cuda {
namespace {

/// What ptxas says of a function: `frame` bytes of stack, and so many stored and loaded by spills.
std::string function_log(const std::string& name, int frame, int stores) {
  return "ptxas info    : Compiling entry function '" + name +
         "' for 'sm_90a'\n"
         "ptxas info    : Function properties for " +
         name + "\nptxas         .     " + std::to_string(frame) + " bytes stack frame, " +
         std::to_string(stores) + " bytes spill stores, " + std::to_string(stores) +
         " bytes spill loads\n"
         "ptxas info    : Used 168 registers, used 9 barriers\n";
}

std::string complaint_of(const std::string& log) { return complaint({true, log, "code", ""}); }

TEST(Complaints, NoneOfACleanLog) {
  EXPECT_EQ(complaint_of(""), "");
  EXPECT_EQ(complaint_of(function_log("forward", 0, 0)), "");
  EXPECT_EQ(complaint_of("ptxas info    : 84 bytes gmem\n" + function_log("a", 0, 0) +
                         function_log("b", 0, 0)),
            "");
}

TEST(Complaints, WhatDoesNotCompileIsSaidFirst) {
  EXPECT_EQ(complaint({false, "a.cu(1): error: C7510 is undefined\n", "", ""}), "does not compile");
}

TEST(Complaints, RemarksOfTheAssembler) {
  EXPECT_EQ(complaint_of(function_log("forward", 0, 0) +
                         "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async "
                         "instructions are serialized\n"),
            "has a C75xx remark of ptxas");
}

TEST(Complaints, SpilledRegisters) {
  EXPECT_EQ(complaint_of("ptxas warning : Registers are spilled to local memory in function "
                         "'forward', 8 bytes spill stores, 8 bytes spill loads\n"),
            "ptxas says: spilled");
  const std::string found = complaint_of(function_log("forward", 8, 12));
  EXPECT_NE(found.find("8 bytes stack frame, 12 bytes spill stores"), std::string::npos) << found;
  EXPECT_EQ(found.find('\n'), std::string::npos) << found;
}

TEST(Complaints, LocalMemory) {
  EXPECT_EQ(complaint_of("ptxas warning : Local memory used for function 'forward', 64 bytes\n"),
            "ptxas says: Local memory used");
}

// A program may have several functions, and each has a line: the first being clean is not enough.
TEST(Complaints, EveryFunctionIsLookedAt) {
  EXPECT_NE(complaint_of(function_log("first", 0, 0) + function_log("second", 16, 0)), "");
  EXPECT_NE(complaint_of(function_log("first", 10, 0) + function_log("second", 0, 0)), "");
}

// The embedding of a build is by symbol: none may stand for two programs.
TEST(Programs, HaveSymbolsOfTheirOwn) {
  std::set<std::string> symbols;
  for (const Program& program : programs()) {
    EXPECT_NE(program.architecture, nullptr);
    EXPECT_TRUE(symbols.insert(program.symbol).second) << program.symbol;
  }
}

class CompiledPrograms : public testing::Test {
 protected:
  void SetUp() override {
    if (!nvrtc_.missing().empty()) GTEST_SKIP() << "no NVRTC: " << nvrtc_.missing();
  }

  MachineCode compile_text(const std::string& text, const Headers& headers = {}) {
    return compile(nvrtc_, {architectures()[0], "tessera_test", text}, "sm_90a", headers);
  }

  static void expect_fit(const MachineCode& code) {
    EXPECT_EQ(code.complaint, "") << code.log;
    EXPECT_EQ(code.cubin.substr(0, 4), std::string("\177ELF")) << code.log;
    EXPECT_NE(code.log.find("bytes stack frame"), std::string::npos) << code.log;
  }

  Nvrtc nvrtc_{TESSERA_NVRTC};
};

// Headers that are nowhere but in memory, one through another.
TEST_F(CompiledPrograms, HeadersMayBeTexts) {
  const std::string text =
      "#include \"outer.h\"\n"
      "extern \"C\" __global__ void tessera_test(int* to) { *to = kAnswer; }\n";
  expect_fit(compile_text(text, {{},
                                 {{"outer.h", "#include <inner/value.h>\n"},
                                  {"inner/value.h", "constexpr int kAnswer = 42;\n"}}}));
  const MachineCode alone = compile_text(text);
  EXPECT_EQ(alone.complaint, "does not compile");
  EXPECT_NE(alone.log.find("outer.h"), std::string::npos) << alone.log;
  EXPECT_EQ(alone.cubin, "");
}

// An architecture's own program, with this project's headers as files: the smallest of them.
TEST_F(CompiledPrograms, HeadersMayBeThisProjects) {
  for (const Program& program : programs()) {
    if (program.symbol != program.architecture->yardstick.symbol) continue;
    for (const Image& image : program.architecture->images) {
      if (!image.is_ptx()) {
        expect_fit(compile(nvrtc_, program, image.target, {TESSERA_SOURCE, {}}));
      }
    }
  }
}

// Rows that no build has code of are looked at by no other test: some of them, others in every run,
// and one of Turing's; with headers that are inside the library, as they are compiled when needed.
TEST_F(CompiledPrograms, RowsThatAreMadeAtNeedFit) {
  constexpr std::size_t kSome = 6;
  std::vector<std::pair<const Program*, std::string>> at_need, turing;
  const std::vector<Program> list = programs();
  for (const Program& program : list) {
    if (program.row == nullptr) continue;
    const bool made = core::is_made_at_need(*program.row);
    if (!made && program.row->arch != Arch::sm75) continue;
    for (const Image& image : program.architecture->images) {
      if (!image.is_ptx() && image.holds(program.architecture->shared_bytes(*program.row))) {
        (made ? at_need : turing).emplace_back(&program, image.target);
      }
    }
  }
  ASSERT_GT(at_need.size(), kSome);
  ASSERT_FALSE(turing.empty());
  Headers embedded;
  for (const DeviceHeader& one : device_headers()) {
    embedded.texts.push_back({one.name, std::string(one.begin, one.end)});
  }
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  std::shuffle(at_need.begin(), at_need.end(), random);
  at_need.resize(kSome);
  at_need.push_back(turing[random() % turing.size()]);
  for (const auto& [program, target] : at_need) {
    SCOPED_TRACE(program->symbol + " for " + target + ", seed " + std::to_string(seed));
    expect_fit(compile(nvrtc_, *program, target, embedded));
  }
}

// PTX of a row has the version that old drivers take, and nothing that needs a newer one.
TEST_F(CompiledPrograms, PtxIsPortable) {
  for (const Program& program : programs()) {
    if (program.symbol != "tessera_sm80_peak") continue;
    const MachineCode code = compile(nvrtc_, program, "compute_80", {TESSERA_SOURCE, {}});
    EXPECT_EQ(code.complaint, "") << code.log;
    EXPECT_NE(code.cubin.find(".version 7.8\n"), std::string::npos);
    EXPECT_NE(code.cubin.find(".target sm_80\n"), std::string::npos);
    EXPECT_NE(code.cubin.find("mma.sync"), std::string::npos);
    return;
  }
  ADD_FAILURE() << "there is no such program";
}

TEST(PortablePtx, LowersTheVersionAndDropsWhatNeedsANewerOne) {
  EXPECT_EQ(portable_ptx("// head\n.version 9.0\n.target sm_80\n\t.pragma \"used_bytes_mask 7\";\n"
                         "ret;\n}\n"),
            "// head\n.version 7.8\n.target sm_80\nret;\n}\n");
  EXPECT_EQ(portable_ptx(".version 9.0\nld.global.b128 x;"), ".version 8.3\nld.global.b128 x;");
  EXPECT_EQ(portable_ptx(""), "");
}

// The options ask ptxas for what complaint() reads.
TEST_F(CompiledPrograms, LocalMemoryIsComplainedOf) {
  const MachineCode code = compile_text(
      "extern \"C\" __global__ void tessera_test(int* to, int n) {\n"
      "  int values[64];\n"
      "  for (int i = 0; i < 64; ++i) values[to[i] & 63] = i;\n"
      "  *to = values[n & 63];\n"
      "}\n");
  EXPECT_EQ(code.complaint.substr(0, 10), "ptxas says") << code.log;
  EXPECT_NE(code.cubin, "") << "it compiles all the same";
}

}  // namespace
}  // namespace tessera::cuda
