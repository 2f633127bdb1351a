// Numbers on the command line: every numeric option of every command refuses what it cannot mean,
// in one short sentence, and reads what it takes as it is written.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/device.hpp"
#include "tools/command.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::json;

/// A command, complete but for an option and its value.
struct Option {
  std::vector<std::string> command;
  std::string name;
  std::vector<std::string> wrong;
  std::string accepted;  ///< after "NAME: must be "
};

std::vector<Option> options() {
  const std::vector<std::string> run = {"run", "-q",    "q.npy", "-k",   "k.npy",
                                        "-v",  "v.npy", "-o",    "o.npy"};
  const std::vector<std::string> check = {"check", "d=4"}, bench = {"bench", "d=4"},
                                 plan = {"plan", "d=4"}, memory = {"memory"};
  const std::string whole = "a whole number from ";
  const std::string threads = whole + "0 to " + std::to_string(kMaxThreads);
  const std::vector<std::string> no_count = {
      "-1", "0", "1.5", "x", "", "1e3", "9999999999999999999"};
  const std::vector<std::string> no_threads = {"-1", "4097", "99999", "1.5", "x", "0x10"};
  const std::vector<std::string> no_seed = {"-1", "18446744073709551616", "1.5", "x"};
  const std::vector<std::string> no_float = {"x", "nan", "inf", "-inf", "1e39", "1 2", ""};
  const std::string seed = whole + "0 to 18446744073709551615";
  const std::string size = whole + "1 to 1099511627776";
  std::vector<Option> all = {
      {run, "--threads", no_threads, threads},
      {check, "--threads", no_threads, threads},
      {bench, "--threads", no_threads, threads},
      {plan, "--threads", no_threads, threads},
      {check, "--count", no_count, whole + "1 to 1000000"},
      {bench, "--seconds", {"-1", "0", "nan", "inf", "1e9", "x"}, "a number above 0, up to 86400"},
      {run, "--seed", no_seed, seed},
      {run, "--offset", no_seed, seed},
      {check, "--seed", no_seed, seed},
      {run, "--window", {"-2,0", "0,-2", "0,x", "1.5,2"}, whole + "-1 to 9223372036854775807"},
      {run, "--softmax-scale", no_float, "a finite number"},
      {run, "--softcap", no_float, "a finite number"},
      {run, "--dropout-p", no_float, "a finite number"},
      {memory, "--batch", {"-1", "x", "1099511627777"}, whole + "0 to 1099511627776"},
  };
  for (const char* name : {"--seqlen", "--element-bytes", "--layers", "--heads", "--heads-k",
                           "--head-dim", "--head-dim-v", "--window", "--sram"}) {
    all.push_back({memory, name, no_count, size});
  }
  const std::vector<std::string> step = {"bench", "--model", "gpt-2"};
  for (const char* name : {"--batch", "--seqlen"}) all.push_back({step, name, no_count, size});
  all.push_back({step, "--page-size", {"-1", "x", "1099511627777"}, whole + "0 to 1099511627776"});
  return all;
}

TEST(Options, ANumberThatCannotBeIsNamedInAShortSentence) {
  for (const Option& option : options()) {
    for (const std::string& value : option.wrong) {
      std::vector<std::string> words = option.command;
      words.push_back(option.name + "=" + value);
      const Ran ran = tessera(words);
      const std::string what = words[0] + " " + words.back() + ": " + ran.err;
      EXPECT_EQ(ran.code, kBadInput) << what;
      EXPECT_EQ(ran.out, "") << what;
      EXPECT_LT(ran.err.size(), 130U) << what;
      if (value.empty()) continue;  // CLI11: no value
      EXPECT_EQ(ran.err.rfind("tessera: " + option.name + ": must be " + option.accepted, 0), 0U)
          << what;
      const std::string last = value.substr(value.find(',') + 1);
      EXPECT_TRUE(ran.err.find(", not " + last) != std::string::npos ||
                  ran.err.find(", not " + value.substr(0, value.find(','))) != std::string::npos)
          << what;
    }
  }
}

/// No option reads a number in its own way: nothing else than the sweep above lists has one.
TEST(Options, TheSweepIsComplete) {
  std::size_t listed = 0;
  for (const char* command : {"run", "check", "bench", "plan", "memory", "info", "docs"}) {
    const std::string help = tessera({command, "--help"}).out;
    for (const char* type : {" INT", " UINT", " FLOAT"}) {
      for (std::size_t at = help.find(type); at != std::string::npos;
           at = help.find(type, at + 1)) {
        ++listed;
      }
    }
  }
  EXPECT_EQ(listed, options().size());
}

/// CLI11 alone takes a leading 0 for octal.
TEST(Options, NumbersAreDecimal) {
  const Ran ran = tessera({"memory", "--layers", "010", "--heads", "08", "--head-dim", "64",
                           "--seqlen", "0100", "--json"});
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  const Json json = Json::parse(ran.out);
  EXPECT_EQ(json["model"]["layers"], 10);
  EXPECT_EQ(json["model"]["num_heads"], 8);
  EXPECT_EQ(json["seqlen"], 100);
  const Ran planned = tessera({"plan", "d=4", "--threads", "007", "--json"});
  EXPECT_EQ(Json::parse(planned.out)["threads"], 7);
  const Ran seeded = tessera({"check", "q=2 k=2 d=4", "--seed", "18446744073709551615", "--json"});
  EXPECT_EQ(Json::parse(seeded.out)["results"][0]["seed"].get<std::uint64_t>(), ~std::uint64_t{0});
}

/// Options that would be passed over are refused: a model's layers, a GPU's SRAM or
/// multiprocessors.
TEST(Options, NothingIsPassedOver) {
  const struct {
    std::vector<std::string> words;
    const char* named;
  } cases[] = {
      {{"memory", "--heads-k", "4"}, "needs --layers, --heads and --head-dim"},
      {{"memory", "--window", "4"}, "needs --layers, --heads and --head-dim"},
      {{"memory", "--head-dim-v", "4"}, "needs --layers, --heads and --head-dim"},
      {{"memory", "--layers", "4", "--heads", "2"}, "needs --layers, --heads and --head-dim"},
      {{"memory", "--model", "gpt-2", "--layers", "4"}, "model = 'gpt-2'"},
      {{"memory", "--cache", "bf16/token"}, "cache = 'bf16/token'"},
      {{"memory", "--cache", "fp8"}, "cache = 'fp8'"},
      {{"memory", "--model", "gpt-2", "--heads-k", "4"}, "model = 'gpt-2'"},
      {{"memory", "--gpu", "h100", "--sram", "4096"}, "gpu = 'h100'"},
      {{"plan", "bf16 d=64 q=8 k=8", "--device", "h200", "--threads", "4"}, "--threads = 4"},
  };
  for (const auto& c : cases) {
    const Ran ran = tessera(c.words);
    EXPECT_EQ(ran.code, kBadInput) << c.named;
    EXPECT_NE(ran.err.find(c.named), std::string::npos) << c.named << ": " << ran.err;
  }
  const Ran planned = tessera({"plan", "bf16 d=64 q=8 k=8", "--threads", "4", "--json"});
  EXPECT_TRUE(Json::parse(planned.out)["kernel"].get<std::string>().starts_with("cpu."));
}

/// A table of the device's own rows, and where the others are.
TEST(Options, APlanListsTheDevicesRows) {
  const Ran cpu = tessera({"plan", "bf16 d=64 q=8 k=8", "--device", "cpu"});
  EXPECT_EQ(cpu.out.find("sm90."), std::string::npos) << cpu.out;
  EXPECT_NE(cpu.out.find("rows for GPUs are left out"), std::string::npos) << cpu.out;
  const Ran gpu = tessera({"plan", "bf16 d=64 q=8 k=8", "--device", "h200"});
  EXPECT_EQ(gpu.out.find("cpu."), std::string::npos) << gpu.out;
  EXPECT_NE(gpu.out.find("rows for CPUs are left out"), std::string::npos) << gpu.out;
}

}  // namespace
}  // namespace tessera::tools
