// The list of problems that a sweep checks: random combinations of every feature, small enough to
// be judged in milliseconds, with every possible pair of two features' values among them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "check/inputs.h"
#include "tessera/device.hpp"

namespace tessera::tools {

/// One check: everything check() needs.
struct Case {
  Problem problem;
  Variation variation;
  std::uint64_t random = 0;  ///< the inputs' numbers
  Arch arch = Arch::portable;
  int threads = 1;
  bool in_reverse = false;  ///< the workers run one after another, the last one first

  std::uint64_t seed() const { return seed_with(variation, random); }
  /// The command that repeats it.
  std::string command() const;
};

/// Something that varies, as a list of values.
struct Feature {
  std::string name;
  std::vector<std::string> values;
  std::function<void(Case& item, int value)> set;
  std::function<int(const Case& item)> get;  ///< index of the value that the case has; -1: none
};

/// All features; a case has one value of each.
const std::vector<Feature>& features();

/// Can these values of two features occur together? (A forward has no gradient of its lse.)
bool possible(std::size_t feature_a, int value_a, std::size_t feature_b, int value_b);

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
