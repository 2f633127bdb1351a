// A block of a kernel's threads, or a cluster of blocks, as fibers of one thread of the host: each
// runs until it waits, then the next. What a warp or a warpgroup does together waits for all of it.
// Nothing runs at the same time as anything else, so a test repeats exactly; and where all wait,
// none of them ever goes on. Warps take turns in being held up.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::device {

inline constexpr unsigned kWarp = 32, kWarpgroup = 128, kMostThreads = 640;

/// Where `count` threads meet: who comes last lets all go on.
struct Meeting {
  unsigned arrived = 0, generation = 0;
  /// races.h: of this one and the next; at one place all that lies between two would be in order.
  char orders[2] = {};
};

/// An mbarrier of shared memory.
struct Mbarrier {
  std::int64_t arrivals = 0, pending = 0, bytes = 0;
  unsigned phase = 0;
  char orders[2] = {};  ///< the same of phases
};

/// A copy to shared memory that is under way: nothing of it is there, and it may read late.
struct Copy {
  void* to = nullptr;
  const void* from = nullptr;  ///< null: zeros
  std::size_t bytes = 0;
};

/// What a thread shows the others of its warp or warpgroup.
using Shown = std::array<std::uint64_t, 6>;

/// What a block has besides its threads.
struct Block {
  unsigned threads = 0;
  std::vector<char> memory;  ///< shared memory, from an address that is a multiple of 1024
  char* shared = nullptr;
  std::map<std::uint32_t, Mbarrier> mbarriers;
  /// Groups of copies of a thread, the last one still open.
  std::array<std::vector<std::vector<Copy>>, kMostThreads> copies;
  std::array<Meeting, 16> named;
  /// Whether a thread of a meeting has shown true: of this one, the next, and the one before, at
  /// which some may still look.
  std::array<std::array<bool, 16>, 3> any_of_named = {};
  Meeting all;
  std::array<bool, 3> any_of_all = {};
  std::array<Meeting, kMostThreads / kWarp> warps;
  std::array<Meeting, kMostThreads / kWarpgroup> warpgroups;
  /// What threads show each other, twice, so that nobody waits before showing the next.
  std::array<std::array<Shown, kMostThreads>, 2> of_warps, of_warpgroups;
};
/// The one whose thread runs, or one of its cluster.
/// @{
Block& block();
Block& block(unsigned number);
/// @}
/// Of that one, in its cluster.
unsigned block_number();

/// The thread that runs.
unsigned thread();
/// Goes on with the others until it is true.
void wait(const std::function<bool()>& condition);
/// Waits for `count` threads; returns the number of meetings before. orders: what each of them has
/// written is seen by all after that.
unsigned meet(Meeting& meeting, unsigned count, bool orders = true);
/// Waits for all threads of the cluster that have not ended.
void meet_cluster();

/// Asks for a copy, of which nobody may see anything before it is done: until then there is NaN.
void begin_copy(const Copy& copy);
/// Ends the thread's open group.
void end_group();
/// All groups are done but the last `left` that have ended; all: what is open, too.
void finish_copies(std::size_t left, bool all);

/// Runs clusters of blocks of a grid one after another. Returns what went wrong: nothing, or that
/// all wait.
std::string run(unsigned blocks, unsigned threads, unsigned shared_bytes,
                const std::function<void(char* shared)>& kernel, unsigned cluster = 1);

}  // namespace tessera::device
