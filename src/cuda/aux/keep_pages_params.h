// What the kernel that lists pages which are not skipped is given: values filled in by
// cuda/keep_pages.cpp.
#pragma once

#include "core/pages.h"

namespace tessera::cuda::aux {

inline constexpr int kKeepThreads = 128;  ///< of a block, which has a sequence

struct KeepPagesParams {
  core::Sequences sequences;
  core::Cache cache;                ///< as it is given
  void* table = nullptr;            ///< [batch][stride], of the cache's type of page numbers
  std::int64_t stride = 0;          ///< columns
  std::int32_t* seqlens = nullptr;  ///< [batch]
};

}  // namespace tessera::cuda::aux
