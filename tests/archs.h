// The instruction sets that tests run on, and what else they try everywhere.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <random>
#include <vector>

#include "tessera/device.hpp"

namespace tessera {

/// Those of this machine. Under ThreadSanitizer the two richest: all share the code that shares
/// data.
inline std::vector<Arch> archs() {
#if defined(__SANITIZE_THREAD__)
  constexpr std::size_t kMost = 2;
#else
  constexpr std::size_t kMost = 4;
#endif
  std::vector<Arch> list;
  for (const Arch arch : {Arch::avx512_bf16, Arch::avx512, Arch::avx2, Arch::portable}) {
    if (arch <= best_arch() && list.size() < kMost) list.push_back(arch);
  }
  return list;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// All of these; with a sanitizer, ten times slower, one by chance, where others try them all.
inline std::vector<const char*> all_or_one(std::initializer_list<const char*> all) {
  if (!kSanitized) return all;
  return {all.begin()[std::random_device{}() % all.size()]};
}
/// The same of a table: with a sanitizer three by chance.
template <std::size_t kCount>
std::vector<const char*> all_or_three(const char* const (&all)[kCount]) {
  std::vector<const char*> list(std::begin(all), std::end(all));
  if (!kSanitized) return list;
  std::shuffle(list.begin(), list.end(), std::mt19937(std::random_device{}()));
  list.resize(std::min<std::size_t>(kCount, 3));
  return list;
}

}  // namespace tessera
