#include "fibers.h"

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_set>

#include "core/hd.h"
#include "cuda_names.h"
#include "races.h"

namespace tessera::device {
namespace {

// Functions that code jumps out of and into: nobody may know which registers they keep.
#ifdef __clang__
#define TESSERA_APART [[gnu::noinline]]
#else
#define TESSERA_APART [[gnu::noipa]]
#endif

constexpr std::size_t kStackBytes = std::size_t{256} << 10;

/// Where code goes on: by jumps, as a context saves signals, too, which asks the kernel each time.
/// The compiler's own jumps are not the C library's, which know one stack.
using Jump = void* [5];

/// A context is how a fiber begins.
struct Fiber {
  ucontext_t context = {};
  Jump goes_on = {};
  void* thread = nullptr;  ///< races.h
  std::unique_ptr<char[]> stack;
  bool begun = false;
  bool done = false;
  bool meets_warps = false;  ///< waits where several warps meet
};

struct Machine {
  std::vector<Block> blocks;  ///< of a cluster
  std::vector<Fiber> fibers;  ///< block after block
  Jump scheduler = {};
  ucontext_t context = {};  ///< the same where there are no jumps
  void* thread = nullptr;   ///< the scheduler's
  /// races.h: of threads with who began them, and with who goes on after all of them; at one place
  /// a thread that has ended would come before one that has not begun.
  char begins = 0, ends = 0;
  unsigned current = 0;
  unsigned threads = 1;  ///< of a block
  unsigned ended = 0;    ///< threads of the cluster
  Meeting cluster;
  std::uint64_t events = 0;                   ///< waits that ended, and threads
  std::unordered_set<const void*> under_way;  ///< where copies go that nobody has waited for
  std::string wrong;
  const std::function<void(char*)>* kernel = nullptr;
};

Machine& machine() {
  static Machine one;
  return one;
}

#if defined(__clang__) && !defined(__x86_64__)
// It has no such jumps there.
/// From the scheduler to a fiber, until that goes back.
TESSERA_APART void resume(Fiber& fiber) {
  become(fiber.thread);
  swapcontext(&machine().context, &fiber.context);
}
/// What fibers do before they begin, and after they end, is the scheduler's.
TESSERA_APART void go_back(Fiber& fiber) {
  become(machine().thread);
  swapcontext(&fiber.context, &machine().context);
}
TESSERA_APART void end() { go_back(machine().fibers[machine().current]); }
#else
/// From the scheduler to a fiber, until that goes back.
TESSERA_APART void resume(Fiber& fiber) {
  if (__builtin_setjmp(machine().scheduler) != 0) return;
  become(fiber.thread);
  if (fiber.begun) __builtin_longjmp(fiber.goes_on, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}
/// What fibers do before they begin, and after they end, is the scheduler's.
TESSERA_APART void end() {
  become(machine().thread);
  __builtin_longjmp(machine().scheduler, 1);
}
TESSERA_APART void go_back(Fiber& fiber) {
  if (__builtin_setjmp(fiber.goes_on) == 0) end();
}
#endif

void enter() {
  Machine& m = machine();
  acquire(&m.begins);
  (*m.kernel)(block().shared);
  release(&m.ends);
  {
    const Unseen unseen;
    m.fibers[m.current].done = true;
    ++m.ended;
    ++m.events;
  }
  end();
}

TESSERA_APART void begin(Fiber& fiber) {
  fiber.begun = fiber.done = fiber.meets_warps = false;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

void prepare(unsigned threads, unsigned shared_bytes, unsigned cluster) {
  Machine& m = machine();
  m.blocks.assign(cluster, {});
  m.under_way.clear();
  m.threads = threads;
  m.ended = 0;
  m.cluster = {};
  for (Block& block : m.blocks) {
    block.threads = threads;
    block.memory.resize(shared_bytes + 2048, '\x7f');  // NaN as e4m3, and as 16 bits
    const auto start = reinterpret_cast<std::uintptr_t>(block.memory.data());
    block.shared = block.memory.data() + (1024 - start % 1024) % 1024;
  }
  m.fibers.resize(std::size_t{threads} * cluster);
  for (Fiber& fiber : m.fibers) {
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
    if (fiber.thread == nullptr) fiber.thread = new_thread();
    begin(fiber);
  }
}

}  // namespace

unsigned block_number() { return machine().current / machine().threads; }
Block& block() { return block(block_number()); }
Block& block(unsigned number) { return machine().blocks.at(number); }
unsigned thread() { return machine().current % machine().threads; }

void wait(const std::function<bool()>& condition) {
  const Unseen unseen;
  Machine& m = machine();
  while (!condition()) go_back(m.fibers[m.current]);
  ++m.events;
}

unsigned meet(Meeting& meeting, unsigned count, bool orders) {
  const Unseen unseen;
  const unsigned before = meeting.generation;
  if (orders) release(meeting.orders + before % 2);
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    ++machine().events;
  } else {
    bool& meets_warps = machine().fibers[machine().current].meets_warps;
    meets_warps = count > kWarp;
    wait([&] { return meeting.generation != before; });
    meets_warps = false;
  }
  if (orders) acquire(meeting.orders + before % 2);
  return before;
}

void meet_cluster() {
  const Unseen unseen;
  Meeting& meeting = machine().cluster;
  const unsigned before = meeting.generation;
  release(meeting.orders + before % 2);
  ++meeting.arrived;
  wait([&] {
    if (meeting.generation != before) return true;
    if (meeting.arrived + machine().ended < machine().fibers.size()) return false;
    meeting.arrived = 0;
    ++meeting.generation;
    return true;
  });
  acquire(meeting.orders + before % 2);
}

void begin_copy(const Copy& copy) {
  {
    const Unseen unseen;
    auto& groups = block().copies[thread()];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(copy);
    if (!machine().under_way.insert(copy.to).second) {
      machine().wrong = "a copy to where another one is under way";  // which may come last
    }
  }
  std::memset(copy.to, 0xFF, copy.bytes);
}
void end_group() {
  auto& groups = block().copies[thread()];
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}
void finish_copies(std::size_t left, bool all) {
  auto& groups = block().copies[thread()];
  const std::size_t ended = groups.empty() ? 0 : groups.size() - (all ? 0 : 1);
  const std::size_t done = ended - std::min(ended, left);
  for (std::size_t i = 0; i < done; ++i) {
    for (const Copy& copy : groups[i]) {
      {
        const Unseen unseen;
        machine().under_way.erase(copy.to);
      }
      if (copy.from == nullptr) {
        std::memset(copy.to, 0, copy.bytes);
      } else {
        std::memcpy(copy.to, copy.from, copy.bytes);
      }
    }
  }
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(done));
}

std::string run(unsigned blocks, unsigned threads, unsigned shared_bytes,
                const std::function<void(char*)>& kernel, unsigned cluster) {
  Machine& m = machine();
  m.kernel = &kernel;
  m.wrong.clear();
  m.thread = this_thread();
  gridDim.x = blocks;
  const unsigned fibers = threads * cluster;
  if (blocks % cluster != 0) return "the grid is not one of whole clusters";
  for (unsigned first_block = 0; first_block < blocks; first_block += cluster) {
    prepare(threads, shared_bytes, cluster);
    release(&m.begins);
    const Unseen unseen;
    // One warp after another is held up where it meets others, until none of these gets on without
    // it: what they must not see before it has come further, they would miss. Then for some rounds
    // none is.
    unsigned held = 0, free = 0, random = 1;
    bool holds = false;
    const auto first_of = [&m](unsigned warp) -> const Fiber& {
      return m.fibers[std::size_t{warp} * kWarp];
    };
    for (unsigned left = fibers, round = 0; left > 0; ++round) {
      holds = holds || (round >= free && first_of(held).meets_warps);
      const std::uint64_t before = m.events;
      for (m.current = 0; m.current < fibers; ++m.current) {
        Fiber& fiber = m.fibers[m.current];
        if (fiber.done || (holds && m.current / kWarp == held)) continue;
        threadIdx.x = thread();
        blockIdx.x = first_block + m.current / threads;
        resume(fiber);
        left -= fiber.done ? 1 : 0;
      }
      const bool stuck = m.events == before;
      if (stuck && !holds) {
        return "block " + std::to_string(first_block) + ": " + std::to_string(left) +
               " threads wait for each other";
      }
      if (stuck || first_of(held).done) {
        holds = false;
        random = random * 1103515245 + 12345;
        held = (random >> 16) % core::ceil_div(fibers, kWarp);
        free = round + (random >> 24) % 64;
      }
    }
    acquire(&m.ends);
  }
  return m.wrong;
}

}  // namespace tessera::device
