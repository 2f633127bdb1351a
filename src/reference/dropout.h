// The dropout mask of S8, written a second time from the published algorithm (Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so that the library's own is judged and
// not repeated.
#pragma once

#include <array>
#include <cstdint>

namespace tessera::reference {

/// Ten rounds of Philox4x32.
std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key);

/// One dropout stream.
class Dropout {
 public:
  Dropout(float probability, std::uint64_t seed, std::uint64_t offset);

  /// What the weight of (batch, query head, query, key) is multiplied by: 0, or 1 / P(keep).
  double factor(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key) const;

 private:
  std::uint32_t threshold_ = 0;  ///< of 65536: this many values of the 16 bits drop the weight
  std::array<std::uint32_t, 2> key_{};
};

}  // namespace tessera::reference
