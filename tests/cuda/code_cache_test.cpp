// The folder of compiled code, attacked: damaged files, files and folders of others, several
// processes at once.
#include "cuda/compiler/code_cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>

#include "cuda/environment.h"
#include "tools/temporary_folder.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class Caches : public testing::Test {
 protected:
  void SetUp() override { set("TESSERA_CACHE_DIR", folder_ / "own"); }

  void set(const char* name, const std::string& value) { environment_.set(name, value); }

  static CodeCache opened() {
    const Result<CodeCache> cache = CodeCache::open(true);
    EXPECT_TRUE(cache) << cache.status().text;
    return *cache;
  }
  /// The only file of the folder.
  static fs::path only_file(const CodeCache& cache) {
    fs::path found;
    for (const auto& entry : fs::directory_iterator(cache.folder())) {
      EXPECT_TRUE(found.empty()) << found << " and " << entry.path();
      found = entry.path();
    }
    return found;
  }
  static std::string refusal() { return CodeCache::open(true).status().text; }

  tools::TemporaryFolder folder_;
  Environment environment_;
  const KeptCode code_ = {"made from this", "13.0", std::string("\177ELF\0code", 9)};
};

TEST_F(Caches, WhatWasWrittenIsRead) {
  const CodeCache cache = opened();
  EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "");
  ASSERT_TRUE(cache.write("kernel", code_));
  const KeptCode read = opened().read("kernel", code_.made_from);
  EXPECT_EQ(read.cubin, code_.cubin);
  EXPECT_EQ(read.made_by, "13.0");
  EXPECT_EQ(cache.read("kernel", "made from that").cubin, "");
  EXPECT_EQ(cache.read("other", code_.made_from).cubin, "");
  struct stat of{};
  ASSERT_EQ(stat(only_file(cache).c_str(), &of), 0);
  EXPECT_EQ(of.st_mode & 0777U, 0600U);
  ASSERT_EQ(stat(cache.folder().c_str(), &of), 0);
  EXPECT_EQ(of.st_mode & 0777U, 0700U);
}

TEST_F(Caches, WhatIsDamagedIsNotThere) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const CodeCache cache = opened();
  ASSERT_TRUE(cache.write("kernel", code_));
  const fs::path path = only_file(cache);
  const std::string whole = tools::bytes_of(path);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    tools::bytes_to(path, whole.substr(0, size));
    EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "") << size << " bytes left";
  }
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string other = whole;
    other[at] = static_cast<char>(other[at] ^ (1 << random() % 8));
    tools::bytes_to(path, other);
    EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "") << "byte " << at;
  }
  tools::bytes_to(path, whole + "x");
  EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "");
  tools::bytes_to(path, whole);
  EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, code_.cubin);
}

TEST_F(Caches, FilesOfOthersAreNotThere) {
  const CodeCache cache = opened();
  ASSERT_TRUE(cache.write("kernel", code_));
  const fs::path path = only_file(cache);
  const std::string elsewhere = folder_ / "elsewhere";
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "") << "others can write it";
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  if (geteuid() == 0) {
    ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
    EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "") << "another's";
    ASSERT_EQ(chown(path.c_str(), 0, 0), 0);
  }
  fs::rename(path, elsewhere);
  fs::create_symlink(elsewhere, path);
  EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "") << "a link";
  // What is written takes the link's place and not its target's.
  ASSERT_TRUE(cache.write("kernel", {code_.made_from, "13.1", code_.cubin}));
  EXPECT_FALSE(fs::is_symlink(path));
  EXPECT_EQ(cache.read("kernel", code_.made_from).made_by, "13.1");
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(cache.read("kernel", code_.made_from).cubin, "") << "a pipe, that nobody waits for";
}

TEST_F(Caches, FoldersOfOthersAreRefused) {
  const std::string folder = opened().folder();
  ASSERT_EQ(chmod(folder.c_str(), 0770), 0);
  EXPECT_NE(refusal().find("'" + folder + "': others can write there"), std::string::npos);
  ASSERT_EQ(chmod(folder.c_str(), 0700), 0);
  if (geteuid() == 0) {
    ASSERT_EQ(chown(folder.c_str(), 12345, 12345), 0);
    EXPECT_NE(refusal().find("yours alone"), std::string::npos);
    ASSERT_EQ(chown(folder.c_str(), 0, 0), 0);
  }
  fs::remove(folder);
  fs::create_symlink(folder_ / "elsewhere", folder);
  EXPECT_NE(refusal().find("is not a folder"), std::string::npos);
  set("TESSERA_CACHE_DIR", "/proc/no/such/folder");
  EXPECT_EQ(CodeCache::open(true).status().code, Code::device);
}

TEST_F(Caches, TheEnvironmentNamesTheFolder) {
  const auto folder = [] { return CodeCache::open(false)->folder(); };
  EXPECT_EQ(folder(), folder_ / "own");
  set("TESSERA_CACHE_DIR", "");
  set("XDG_CACHE_HOME", folder_ / "xdg");
  set("HOME", folder_ / "home");
  EXPECT_EQ(folder(), folder_ / "xdg/tessera");
  set("XDG_CACHE_HOME", "relative");
  EXPECT_EQ(folder(), folder_ / "home/.cache/tessera");
  EXPECT_FALSE(fs::exists(folder())) << "looking makes nothing";
  EXPECT_EQ(opened().folder(), folder()) << "nor must what it lies in be there";
  set("HOME", "");
  EXPECT_NE(refusal().find("set TESSERA_CACHE_DIR"), std::string::npos);
}

/// Eight write and read the same kernel: whoever reads has all of one of the versions, or nothing.
TEST_F(Caches, ProcessesDoNotSeeEachOthersHalves) {
  const CodeCache cache = opened();
  const auto version = [](int i) {
    const std::size_t size = 100000 + static_cast<std::size_t>(i);
    return KeptCode{"text", std::to_string(i), std::string(size, static_cast<char>('a' + i))};
  };
  constexpr int kProcesses = 8, kTimes = 20;
  for (int i = 0; i < kProcesses; ++i) {
    if (fork() != 0) continue;
    int wrong = 0;
    for (int time = 0; time < kTimes; ++time) {
      if (!cache.write("kernel", version(i))) ++wrong;
      const KeptCode read = cache.read("kernel", "text");
      const KeptCode right = version(read.made_by.empty() ? 0 : read.made_by[0] - '0');
      if (read.cubin != right.cubin) ++wrong;
    }
    _exit(wrong == 0 ? 0 : 1);
  }
  for (int i = 0; i < kProcesses; ++i) {
    int status = 0;
    ASSERT_GT(wait(&status), 0);
    EXPECT_EQ(status, 0);
  }
  only_file(cache);  // nothing is left beside it
}

TEST_F(Caches, OneCompilesAndOthersWait) {
  using Clock = std::chrono::steady_clock;
  const CodeCache cache = opened();
  const auto seconds = [&](double limit) {
    const auto begin = Clock::now();
    const CodeCache::Turn turn(cache, "kernel", "text", limit);
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    {
      const CodeCache::Turn turn(cache, "kernel", "text", 30.0);
      if (write(ready[1], "x", 1) != 1) _exit(1);
      usleep(2000000);
    }
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_LT(seconds(0.05), 1.5) << "who has waited long enough goes on";
  const double waited = seconds(30.0);
  EXPECT_GT(waited, 0.1);
  EXPECT_LT(waited, 10.0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(Caches, WhatWasUsedLongestAgoGoesFirst) {
  const CodeCache cache = opened();
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_TRUE(cache.write(name, {"text", "13.0", std::string(1000, 'x')}));
  }
  const auto set_age = [&](const std::string& name, int hours) {
    for (const auto& entry : fs::directory_iterator(cache.folder())) {
      if (!entry.path().filename().string().starts_with(name + ".")) continue;
      fs::last_write_time(entry.path(),
                          fs::file_time_type::clock::now() - std::chrono::hours(hours));
    }
  };
  set_age("a", 3);
  set_age("b", 5);
  set_age("c", 9);
  EXPECT_EQ(cache.read("c", "text").cubin.size(), 1000U);  // used: it is the youngest now
  cache.trim(2500, "");
  const std::vector<CachedKernel> left = cache.list();
  ASSERT_EQ(left.size(), 2U);
  EXPECT_EQ(left[0].name, "a");
  EXPECT_EQ(left[1].name, "c");
  EXPECT_GT(left[0].bytes, 1000U);
  EXPECT_GT(left[1].last_use, left[0].last_use);
  cache.trim(0, cache.folder() + "/" + "no");
  EXPECT_TRUE(cache.list().empty());
}

TEST_F(Caches, ClearingLeavesWhatIsNotItsOwn) {
  const CodeCache cache = opened();
  ASSERT_TRUE(cache.write("a", code_));
  ASSERT_TRUE(cache.write("b", code_));
  tools::bytes_to(cache.folder() + "/notes.txt", "of the user's");
  EXPECT_EQ(cache.clear(), 2U);
  EXPECT_EQ(only_file(cache).filename(), "notes.txt");
  set("TESSERA_CACHE_DIR", folder_ / "none");
  EXPECT_EQ(CodeCache::open(false)->clear(), 0U);
  EXPECT_TRUE(CodeCache::open(false)->list().empty());
}

}  // namespace
}  // namespace tessera::cuda
