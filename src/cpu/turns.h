// Turns: work items that add to the same memory do so one after another in a fixed order, so that a
// sum does not depend on who was fastest. Used by the backward's dQ; relax() by whoever spins.
#pragma once

#include <cstdint>

namespace tessera::cpu {

/// What a thread does between two looks at memory that another one will write.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Returns once *turn is `value`: soon, for the order of tasks sees to it that the item waited for
/// runs or has run.
void wait_for_turn(const std::int32_t* turn, std::int32_t value);

/// Lets the item that waits for `value` go on; it sees all that was written before.
// NOLINTNEXTLINE(readability-non-const-parameter): the builtin writes through it
inline __attribute__((always_inline)) void pass_turn(std::int32_t* turn, std::int32_t value) {
  __atomic_store_n(turn, value, __ATOMIC_RELEASE);
}

}  // namespace tessera::cpu
