// What quantising makes of a row by literal loops (S14): for the tests of all that writes 8 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "elements.h"
#include "tessera/tessera.hpp"

namespace tessera {

/// Turns the first r.dim numbers of a row at the position, if the tables have it. stride: elements
/// from one position to the next.
inline void rotate_fused(std::vector<float>& x, const RotaryShape& r, const Elements& cos,
                         const Elements& sin, std::int64_t stride, std::int64_t position) {
  if (position < 0 || position >= r.positions) return;
  for (std::int64_t j = 0; j < r.dim / 2; ++j) {
    float& a = x[static_cast<std::size_t>(r.interleaved ? 2 * j : j)];
    float& b = x[static_cast<std::size_t>(r.interleaved ? 2 * j + 1 : j + r.dim / 2)];
    const auto c = static_cast<float>(cos.at(position * stride + j));
    const auto s = static_cast<float>(sin.at(position * stride + j));
    const float turned = std::fma(a, c, -(b * s));
    b = std::fma(a, s, b * c);
    a = turned;
  }
}

/// A written scale of the numbers, and what they are multiplied by.
struct RoundedScale {
  float scale = 1.0F, factor = 1.0F;
};

inline RoundedScale scale_of(const std::vector<std::vector<float>>& rows, Dtype dtype) {
  float amax = 0.0F;
  for (const std::vector<float>& row : rows) {
    for (const float x : row) {
      if (!std::isnan(x)) amax = std::max(amax, std::abs(x));
    }
  }
  if (amax == 0.0F) return {};
  amax = std::clamp(amax, 0x1p-100F, std::numeric_limits<float>::max());
  const float limit = dtype == Dtype::i8 ? 127.0F : 448.0F;
  return {amax / limit, limit / amax};
}

/// What is stored of a number. Not a number is a number of i8, and has no sign in e4m3.
inline double rounded(float x, float factor, Dtype dtype) {
  const float y = x * factor;
  if (!std::isnan(y)) return static_cast<double>(y);
  return dtype == Dtype::i8 ? 0.0 : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace tessera
