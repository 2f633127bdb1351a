// The instruction sets that tests run on.
#pragma once

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

}  // namespace tessera
