// The list of problems that a sweep checks: random combinations of every feature, small enough to
// be judged in milliseconds, with every possible pair of two features' values among them.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <vector>

#include "check/features.h"

namespace tessera::tools {

/// Products that the judge has to compute, roughly: pairs of query and key times head dims.
std::int64_t work_of(const Case& item);

/// Which pairs of two features' values occur in a list of cases.
class Pairs {
 public:
  using Pair = std::array<int, 4>;  ///< feature, value, feature, value

  void add(const Case& item);
  /// Possible pairs that did not occur; instruction sets up to `best`.
  std::vector<Pair> missing(Arch best) const;

 private:
  std::set<Pair> seen_;
};

/// At least `count` cases, the same for the same seed; from kFullSweep on, every pair of two
/// features' values that is possible occurs. Instruction sets are those up to `best`.
std::vector<Case> cases(std::uint64_t seed, std::int64_t count, Arch best);

inline constexpr std::int64_t kFullSweep = 20000;

}  // namespace tessera::tools
