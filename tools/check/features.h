// What varies from case to case of a sweep (problems.h), as one table.
#pragma once

#include <cstdint>
#include <functional>
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

/// A feature's number.
std::size_t index_of(const char* name);

/// Two values that cannot occur together.
struct Contradiction {
  std::size_t a = 0;
  int value_a = 0;
  std::size_t b = 0;
  int value_b = 0;
};

/// All of them. Found once: they are asked for millions of times.
const std::vector<Contradiction>& contradictions();

/// How q, k and v are scaled. The first: they are not of 8 bits.
extern const std::vector<std::string> kScales;

/// What only tensors of 8 bits have.
inline constexpr const char* kOfScales[] = {"v dtype",     "kv dtype", "scales",
                                            "score shift", "v shift",  "v tiles"};

/// What asks for positions of keys, which those of a table that skips pages have not.
inline constexpr const char* kPositional[] = {"window", "chunk", "sink_tokens", "tree",   "leftpad",
                                              "alibi",  "bias",  "bias dtype",  "dropout"};

/// Lengths around every power of two that a tile may have, and around the splits.
/// @{
extern const std::vector<std::int64_t> kSeqlensQ;
extern const std::vector<std::int64_t> kSeqlensK;
/// @}

}  // namespace tessera::tools
