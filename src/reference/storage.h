// Storage types as numbers: reads an element of memory as double, and rounds a number to what such
// an element can hold (nearest, ties to even; 8 bits saturate: e4m3 at 448, i8 at 127). Used by the
// reference, the naive computation and the checker; written without core so that it judges core.
#pragma once

#include <cstdint>

#include "tessera/types.hpp"

namespace tessera::reference {

/// Element `index` of an array.
double load(Dtype dtype, const void* data, std::int64_t index);

/// Writes the nearest value that `dtype` holds.
void store(Dtype dtype, void* data, std::int64_t index, double value);

/// The nearest value that `dtype` holds; overflow gives infinity, of 8 bits the largest value; NaN
/// stays NaN, where the type has one.
float round_to(Dtype dtype, float value);

/// Largest relative error of one rounding: half a unit in the last place.
double unit_roundoff(Dtype dtype);

/// Largest absolute error of rounding a number too small to be normal.
double subnormal_roundoff(Dtype dtype);

}  // namespace tessera::reference
