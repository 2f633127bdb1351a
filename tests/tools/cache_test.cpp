// tessera cache: what it says of the folder of compiled code, and what it refuses.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "commands.h"
#include "tools/command.h"
#include "tools/temporary_folder.h"

namespace tessera::tools {
namespace {

class CacheCommand : public testing::Test {
 protected:
  void SetUp() override { setenv("TESSERA_CACHE_DIR", folder().c_str(), 1); }
  void TearDown() override { unsetenv("TESSERA_CACHE_DIR"); }
  std::string folder() const { return temporary_ / "code"; }

  TemporaryFolder temporary_;
};

TEST_F(CacheCommand, AFolderThatIsNotThereIsEmpty) {
  EXPECT_EQ(tessera({"cache", "list"}).out, folder() + ": 0 compiled kernels, 0 B\n");
  const Json json = Json::parse(tessera({"cache", "list", "--json"}).out);
  EXPECT_EQ(json["folder"], folder());
  EXPECT_TRUE(json["kernels"].empty());
  EXPECT_EQ(tessera({"cache", "clear"}).out, "0 compiled kernels removed\n");
  EXPECT_FALSE(std::filesystem::exists(folder()));
}

TEST_F(CacheCommand, OthersFoldersAreRefused) {
  std::filesystem::create_directory(folder());
  std::filesystem::permissions(folder(), std::filesystem::perms::all);
  for (const char* what : {"list", "clear"}) {
    const Ran ran = tessera({"cache", what});
    EXPECT_EQ(ran.code, kCannot) << what;
    EXPECT_NE(ran.err.find("others can write there"), std::string::npos) << ran.err;
  }
}

TEST_F(CacheCommand, WarmSaysWhatItNeeds) {
  EXPECT_EQ(tessera({"cache"}).code, kBadInput);
  const Ran nothing = tessera({"cache", "warm", "--device", "h200"});
  EXPECT_EQ(nothing.code, kBadInput);
  EXPECT_NE(nothing.err.find("give some, or a --model"), std::string::npos) << nothing.err;
  const Ran unknown = tessera({"cache", "warm", "--device", "h200", "--model", "no-model"});
  EXPECT_EQ(unknown.code, kBadInput);
  EXPECT_NE(unknown.err.find("model = 'no-model'"), std::string::npos) << unknown.err;
  const Ran seqlen = tessera({"cache", "warm", "--device", "h200", "--seqlen", "100"});
  EXPECT_EQ(seqlen.code, kBadInput);
}

// A CPU's kernels are all there, as are those of a build with GPU kernels.
TEST_F(CacheCommand, WarmLeavesWhatIsThere) {
  const Ran cpu = tessera({"cache", "warm", "--device", "cpu", "fwd f32 h=2 q=8 k=8 d=64"});
  EXPECT_EQ(cpu.code, kSuccess) << cpu.err;
  EXPECT_NE(cpu.out.find(": 0 kernels compiled"), std::string::npos) << cpu.out;
  const Ran encoder = tessera({"cache", "warm", "--device", "cpu", "--model", "bert-base"});
  EXPECT_EQ(encoder.code, kSuccess) << encoder.err;
  EXPECT_NE(encoder.out.find("2 problems on "), std::string::npos) << encoder.out;
  const Ran llama =
      tessera({"cache", "warm", "--device", "cpu", "--model", "llama-3-8b", "--seqlen", "64"});
  EXPECT_NE(llama.out.find("3 problems on "), std::string::npos) << llama.out << llama.err;
}

}  // namespace
}  // namespace tessera::tools
