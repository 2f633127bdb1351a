// What the kernel that finds shared prefixes is given: values filled in by cuda/find_prefixes.cpp.
#pragma once

#include "core/divisor.h"
#include "core/prefixes.h"

namespace tessera::cuda::aux {

/// Of a block, which compares a sequence with the one before.
inline constexpr int kFindThreads = 128;

struct FindPrefixesParams {
  core::Sequences sequences;
  core::Cache cache;
  core::MaskRules mask;
  core::PrefixRules rules;
  /// [batch] keys in common with the sequence before, and above them `ticket`: the block that
  /// chooses waits for the others', and leaves zeros.
  std::uint64_t* common = nullptr;
  std::uint32_t ticket = 0;
  core::CommonKeys* list = nullptr;   ///< [batch], as the next: where they do not fit shared memory
  core::OwnKeys* own = nullptr;       ///< [batch]
  core::Segment* segments = nullptr;  ///< [2 batch] what is left of every sequence, then prefixes
  core::SegmentCount* count = nullptr;
};

}  // namespace tessera::cuda::aux
