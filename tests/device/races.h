// Races between a kernel's threads, found by the thread sanitizer: to it every fiber is a thread,
// and only what orders memory on a GPU orders it here: barriers and __syncwarp, not shuffles or
// products. Elsewhere all of this is nothing.
#pragma once

namespace tessera::device {

#ifdef TESSERA_SEES_RACES
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
inline constexpr bool kSeesRaces = true;
inline void* this_thread() { return __tsan_get_current_fiber(); }
inline void* new_thread() { return __tsan_create_fiber(0); }
/// Goes on as another one, which is not ordered by it.
inline void become(void* thread) { __tsan_switch_to_fiber(thread, 1); }
/// What was written before the one is seen after the other, at the same address.
/// @{
inline void release(const void* at) { __tsan_release(const_cast<void*>(at)); }
inline void acquire(const void* at) { __tsan_acquire(const_cast<void*>(at)); }
/// @}
/// What fibers, not the kernel, read and write; and what it does atomically.
class Unseen {
 public:
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};
#else
inline constexpr bool kSeesRaces = false;
inline void* this_thread() { return nullptr; }
inline void* new_thread() { return nullptr; }
inline void become(void* /*thread*/) {}
inline void release(const void* /*at*/) {}
inline void acquire(const void* /*at*/) {}
class [[maybe_unused]] Unseen {};
#endif

}  // namespace tessera::device
