// In place of src/cuda/ptx/memory.h where a kernel runs on fibers (fibers.h): what is asked for is
// there at once.
#pragma once

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "cuda/fake_driver.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tensor_map.h"

namespace tessera::cuda::ptx {

/// The 16 bytes at an address of the 128-byte swizzle: their number goes by the line's.
inline std::uint32_t swizzled128(std::uint32_t address) {
  return address ^ (address >> 7 & 7) << 4;
}

/// body(shared, element): of every element of a box its place in shared memory, from an address on,
/// and that in the tensor; null: outside. Returns the bytes in shared memory.
template <class Body>
std::int64_t for_box(const fake::EncodedMap& m, std::uint32_t shared, int c0, int c1, int c2,
                     int c3, const Body& body) {
  const int at[4] = {c0, c1, c2, c3};
  const auto size = static_cast<std::int64_t>(m.element_bytes);
  std::uint32_t line = shared;
  for (unsigned i3 = 0; i3 < m.box[3]; ++i3) {
    for (unsigned i2 = 0; i2 < m.box[2]; ++i2) {
      for (unsigned i1 = 0; i1 < m.box[1]; ++i1, line += 128) {
        for (unsigned i0 = 0; i0 < m.box[0]; ++i0) {
          const std::int64_t index[4] = {at[0] + std::int64_t{i0}, at[1] + std::int64_t{i1},
                                         at[2] + std::int64_t{i2}, at[3] + std::int64_t{i3}};
          bool inside = true;
          std::int64_t offset = index[0] * size;
          for (int i = 0; i < 4; ++i) {
            inside = inside && index[i] >= 0 && index[i] < static_cast<std::int64_t>(m.sizes[i]);
            if (i > 0) offset += index[i] * static_cast<std::int64_t>(m.strides[i - 1]);
          }
          body(shared_memory(swizzled128(line + i0 * static_cast<std::uint32_t>(size))),
               inside ? const_cast<char*>(m.address) + offset : nullptr);
        }
      }
    }
  }
  return std::int64_t{line} - shared;
}

inline void tma_load(std::uint32_t to, const TensorMap& map, std::uint32_t barrier, int c0, int c1,
                     int c2, int c3) {
  fake::EncodedMap m;
  std::memcpy(&m, &map, sizeof m);
  const std::int64_t bytes = for_box(m, to, c0, c1, c2, c3, [&](char* shared, const char* element) {
    if (element != nullptr) {
      std::memcpy(shared, element, m.element_bytes);
    } else {
      std::memset(shared, 0, m.element_bytes);
    }
  });
  mbarrier_complete(barrier, bytes);
}
inline void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                      std::uint32_t barrier, std::uint64_t /*policy*/ = 0) {
  std::memcpy(shared_memory(to), from, bytes);
  mbarrier_complete(barrier, bytes);
}

/// Boxes that a thread has sent and not waited for: shared memory is read as late as it can be, so
/// what overwrites it too early is sent, and what nobody waits for never is.
inline std::vector<std::function<void()>>& sent_boxes() {
  thread_local std::map<std::pair<unsigned, unsigned>, std::vector<std::function<void()>>> all;
  return all[{blockIdx.x, threadIdx.x}];
}
inline void tma_store_if(bool condition, const TensorMap& map, std::uint32_t from, int c0, int c1,
                         int c2, int c3) {
  if (!condition) return;
  const device::Unseen unseen;
  fake::EncodedMap m;
  std::memcpy(&m, &map, sizeof m);
  sent_boxes().push_back([=] {
    for_box(m, from, c0, c1, c2, c3, [&](char* shared, char* element) {
      if (element != nullptr) std::memcpy(element, shared, m.element_bytes);
    });
  });
}
inline void bulk_commit() {}
inline void bulk_wait_read() {
  const device::Unseen unseen;
  for (const auto& send : sent_boxes()) send();
  sent_boxes().clear();
}

inline void load_matrices(std::uint32_t* words, std::uint32_t from) {
  const auto* const row = device::show_warp({from});
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    const auto line = static_cast<std::uint32_t>(row[8 * i + lane / 4][0]);
    std::memcpy(words + i, shared_memory(line + lane % 4 * 4), 4);
  }
}
inline void store_matrices(std::uint32_t to, const std::uint32_t* words) {
  const auto* const row = device::show_warp({to});
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    const auto line = static_cast<std::uint32_t>(row[8 * i + lane / 4][0]);
    std::memcpy(shared_memory(line + lane % 4 * 4), words + i, 4);
  }
}
template <class T>
T load_relaxed(const T* from) {
  const device::Unseen unseen;
  return *from;
}
template <class T>
T load_acquire(const T* from) {
  const device::Unseen unseen;
  device::acquire(from);
  return *from;
}
template <class T>
void store_release(T* to, T x) {
  const device::Unseen unseen;
  device::release(to);
  *to = x;
}
template <class T>
void store_relaxed(T* to, const T& x) {
  const device::Unseen unseen;
  *to = x;
}
inline void prefetch(const void* /*from*/, std::uint32_t /*bytes*/, std::uint64_t /*policy*/) {}
inline void store_shared(std::uint32_t to, const std::uint32_t (&words)[4]) {
  std::memcpy(shared_memory(to), words, 16);
}
inline void store_shared(std::uint32_t to, float a, float b, float c, float d) {
  const float four[4] = {a, b, c, d};
  std::memcpy(shared_memory(to), four, sizeof four);
}
inline void store_shared(std::uint32_t to, std::uint32_t word) {
  std::memcpy(shared_memory(to), &word, sizeof word);
}
inline void store_shared(std::uint32_t to, std::int64_t number) {
  std::memcpy(shared_memory(to), &number, sizeof number);
}
inline void add_global_or_store(bool store, float* to, float x) {
  if (store) {
    *to = x;
  } else {
    atomicAdd(to, x);
  }
}
inline void add_global_or_store(bool store, float* to, float a, float b, float c, float d) {
  const float four[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) add_global_or_store(store, to + i, four[i]);
}
inline void add_global(float* to, float a, float b, float c, float d) {
  add_global_or_store(false, to, a, b, c, d);
}
inline void add_release(std::int32_t* to, std::int32_t x) {
  device::release(to);
  atomicAdd(to, x);
}
inline std::uint32_t load_shared(std::uint32_t from) {
  std::uint32_t word;
  std::memcpy(&word, shared_memory(from), sizeof word);
  return word;
}
inline void load_shared(std::uint32_t from, std::int64_t& number) {
  std::memcpy(&number, shared_memory(from), sizeof number);
}
inline void load_shared(std::uint32_t from, float& a, float& b) {
  float two[2];
  std::memcpy(two, shared_memory(from), sizeof two);
  a = two[0];
  b = two[1];
}
inline void load_shared(std::uint32_t from, float& a, float& b, float& c, float& d) {
  float four[4];
  std::memcpy(four, shared_memory(from), sizeof four);
  a = four[0];
  b = four[1];
  c = four[2];
  d = four[3];
}

inline void store_if(bool condition, void* to, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t words[2] = {a, b};
  if (condition) std::memcpy(to, words, sizeof words);
}
template <class T>
void store_if(bool condition, T* to, T x) {
  if (condition) *to = x;
}
template <class T>
T load_if(bool condition, const T* from) {
  return condition ? *from : T{};
}
inline float load_in_order_if(bool condition, const float* from) {
  return load_if(condition, from);
}

}  // namespace tessera::cuda::ptx
