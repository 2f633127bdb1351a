// Random problems for the explorer's engine: those of the sweep, half of them as large as people
// ask for.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/problem.hpp"

namespace tessera::explorer {

/// Valid ones; the same for the same seed. largest: factor of their lengths.
std::vector<Problem> random_problems(std::uint64_t seed, std::int64_t count, std::int64_t largest);

}  // namespace tessera::explorer
