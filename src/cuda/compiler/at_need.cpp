#include "cuda/compiler/at_need.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "cuda/compiler/code_cache.h"
#include "cuda/compiler/device_headers.h"
#include "cuda/compiler/find_nvrtc.h"
#include "tessera/tessera.hpp"

namespace tessera::cuda {
namespace {

constexpr double kTurnSeconds = 30.0;  // that one process waits for another's compilation

/// Says what is going on if it goes on for more than a second.
class Patience {
 public:
  explicit Patience(std::string line) : line_(std::move(line)), thread_([this] { wait(); }) {}
  ~Patience() {
    {
      const std::scoped_lock lock(mutex_);
      done_ = true;
    }
    ended_.notify_one();
    thread_.join();
  }
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;

 private:
  void wait() {
    std::unique_lock lock(mutex_);
    if (ended_.wait_for(lock, std::chrono::seconds(1), [this] { return done_; })) return;
    std::fprintf(stderr, "%s\n", line_.c_str());
  }

  const std::string line_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;  // the last member: it uses the others
};

const std::vector<HeaderText>& headers() {
  static const std::vector<HeaderText> all = [] {
    std::vector<HeaderText> texts;
    for (const DeviceHeader& one : device_headers()) {
      texts.push_back({one.name, std::string(one.begin, one.end)});
    }
    return texts;
  }();
  return all;
}

/// What is compiled: a program for a device.
struct Wanted {
  const Program& program;
  std::string target;
  int driver = 0;
};

Wanted wanted(const Program& program, int capability, int driver) {
  return {program, program.architecture->target_on(capability), driver};
}

/// All that decides about a program's code, but NVRTC.
std::string made_from(const Wanted& wanted) {
  static const std::uint64_t hash = [] {
    std::uint64_t all = hash_of("");
    for (const HeaderText& one : headers()) all = hash_of(one.text, hash_of(one.name, all));
    return all;
  }();
  std::string text = std::string("tessera ") + version() + "\nheaders " + std::to_string(hash);
  for (const std::string& option : options_of(wanted.target, "")) text += "\n" + option;
  return text + "\n" + wanted.program.text;
}

NvrtcNeed need_of(const Wanted& wanted) { return {wanted.target, wanted.driver}; }

/// The first lines of what NVRTC says.
std::string beginning_of(const std::string& log) {
  constexpr std::size_t kMost = 600;
  return log.size() <= kMost ? log : log.substr(0, kMost) + " ...";
}

Result<std::string> compile_now(const Nvrtc& nvrtc, const Wanted& wanted) {
  const Program& program = wanted.program;
  const Patience patience("tessera: compiling " + program.symbol + " by NVRTC " + nvrtc.version() +
                          ", once for this machine");
  MachineCode code = compile(nvrtc, program, wanted.target, {{}, headers()});
  if (!code.cubin.empty()) return std::move(code.cubin);
  return Status::device(program.symbol + ": NVRTC " + nvrtc.version() +
                        " does not compile it: " + beginning_of(code.log));
}

/// Said once.
void say_not_kept(const std::string& why) {
  static std::once_flag said;
  std::call_once(said, [&] {
    std::fprintf(stderr, "tessera: compiled kernels are not kept for the next process: %s\n",
                 why.c_str());
  });
}

Result<std::string> find_or_make(const Wanted& wanted, std::size_t* compiled) {
  const Program& program = wanted.program;
  const FoundNvrtc found = find_nvrtc(need_of(wanted));
  const std::string from = made_from(wanted);
  // Never made here: who only reads leaves nothing behind.
  const Result<CodeCache> cache = CodeCache::open(found.nvrtc != nullptr);
  const auto kept = [&]() -> std::string {
    if (!cache) return {};
    KeptCode code = cache->read(program.symbol, from);
    const bool fits = found.nvrtc == nullptr || code.made_by == found.nvrtc->version();
    return fits ? std::move(code.cubin) : std::string();
  };
  if (std::string code = kept(); !code.empty()) return code;
  if (found.nvrtc == nullptr) {
    return Status::device(program.symbol +
                          ": is not part of this build, and nothing here compiles "
                          "it: " +
                          found.why);
  }
  std::optional<CodeCache::Turn> turn;
  if (cache) {
    turn.emplace(*cache, program.symbol, from, kTurnSeconds);
    if (std::string code = kept(); !code.empty()) return code;
  }
  Result<std::string> code = compile_now(*found.nvrtc, wanted);
  if (!code) return code;
  if (compiled != nullptr) ++*compiled;
  const Status written =
      cache ? cache->write(program.symbol, {from, found.nvrtc->version(), *code}) : cache.status();
  if (!written) say_not_kept(written.text);
  return code;  // what was made, not what a file has: another process may be writing it
}

}  // namespace

bool can_make(const Architecture& architecture, int capability, int driver) {
  if (device_headers().empty()) return false;
  const Program program = auxiliary_program_of(architecture);
  const Wanted one = wanted(program, capability, driver);
  if (find_nvrtc(need_of(one)).nvrtc != nullptr) return true;
  const Result<CodeCache> cache = CodeCache::open(false);
  return cache && !cache->read(program.symbol, made_from(one)).cubin.empty();
}

Result<std::string> machine_code(const Program& program, int capability, int driver,
                                 std::size_t* compiled) {
  static std::mutex mutex;  // of code that is compiled, so that what the build has never waits
  static std::map<std::string, std::string> made;  // by target and text
  if (device_headers().empty()) {
    return Status::device(program.symbol + ": is not part of this build, which is without CUDA");
  }
  const Wanted one = wanted(program, capability, driver);
  const std::string key = one.target + "\n" + program.text;
  const std::scoped_lock lock(mutex);
  if (const auto known = made.find(key); known != made.end()) return known->second;
  Result<std::string> code = find_or_make(one, compiled);
  if (code) made[key] = *code;
  return code;
}

}  // namespace tessera::cuda
