// Random numbers by counter: number `index` of stream `stream` under a seed, in any order, on any
// machine the same. For test inputs only.
#pragma once

#include <cmath>
#include <cstdint>

namespace tessera::tools {

class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : key_(mix(mix(seed) + stream)) {}

  /// 64 random bits (the finaliser of splitmix64 over a counter).
  std::uint64_t bits(std::uint64_t index) const { return mix(key_ + index * 0x9E3779B97F4A7C15U); }
  std::uint64_t next() { return bits(counter_++); }

  /// Uniform in [0, 1).
  double uniform(std::uint64_t index) const {
    return static_cast<double>(bits(index) >> 11) * 0x1p-53;
  }
  double next_uniform() { return uniform(counter_++); }

  /// Whole number in [low, high].
  std::int64_t next_between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }

  /// Normal with mean 0 and variance 1 (Box and Muller), in fp32: no input is stored in more.
  double normal(std::uint64_t index) const {
    const auto uniform24 = [this](std::uint64_t i) {
      return static_cast<float>(bits(i) >> 40) * 0x1p-24F;
    };
    const float radius = std::sqrt(-2.0F * std::log(1.0F - uniform24(2 * index)));
    return static_cast<double>(radius * std::cos(6.2831853F * uniform24(2 * index + 1)));
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
  }

  std::uint64_t key_;
  std::uint64_t counter_ = 0;
};

}  // namespace tessera::tools
