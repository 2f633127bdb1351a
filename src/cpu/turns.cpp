// Waiting for a turn: spins while that is likely to be short, then lets other threads have the
// core.
#include "cpu/turns.h"

#include <thread>

namespace tessera::cpu {

void wait_for_turn(const std::int32_t* turn, std::int32_t value) {
  constexpr int kSpins = 2000;
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != value; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace tessera::cpu
