// Guard zones lie on either side. AddressSanitizer sees reads there, too.
#include "check/memory.h"

#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace tessera::tools {
namespace {

constexpr std::size_t kAlignment = 64;

/// Forbids or allows access to memory for AddressSanitizer.
void forbid([[maybe_unused]] std::byte* start, [[maybe_unused]] std::size_t bytes,
            [[maybe_unused]] bool forbidden) {
#ifdef __SANITIZE_ADDRESS__
  if (forbidden) {
    ASAN_POISON_MEMORY_REGION(start, bytes);
  } else {
    ASAN_UNPOISON_MEMORY_REGION(start, bytes);
  }
#endif
}

}  // namespace

void poison(std::byte* start, std::size_t bytes) {
  for (std::size_t i = 0; i + 1 < bytes; i += 2) std::memcpy(start + i, &kPoison, 2);
  if (bytes % 2 != 0) start[bytes - 1] = kLastPoison;
}

bool all_poison(const std::byte* start, std::size_t bytes) {
  for (std::size_t i = 0; i + 1 < bytes; i += 2) {
    if (std::memcmp(start + i, &kPoison, 2) != 0) return false;
  }
  return bytes % 2 == 0 || start[bytes - 1] == kLastPoison;
}

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::size_t shift)
    : storage_(bytes + shift + 2 * kGuard + kAlignment), bytes_(bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(storage_.data() + kGuard);
  const std::size_t up = (kAlignment - address % kAlignment) % kAlignment;
  start_ = storage_.data() + kGuard + up + shift;
  poison(start_ - kGuard, kGuard);
  poison(start_, bytes);
  poison(start_ + bytes, kGuard);
  forbid_guards(true);
}

bool GuardedBuffer::guards_intact() const {
  if (start_ == nullptr) return true;
  forbid_guards(false);
  const bool intact = all_poison(start_ - kGuard, kGuard) && all_poison(start_ + bytes_, kGuard);
  forbid_guards(true);
  return intact;
}

void GuardedBuffer::forbid_guards(bool forbidden) const {
  forbid(start_ - kGuard, kGuard, forbidden);
  forbid(start_ + bytes_, kGuard, forbidden);
}

}  // namespace tessera::tools
