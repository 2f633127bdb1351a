// How far rounding alone may carry a right result from the exact one: an error analysis to first
// order, element by element, without luck. A tiny or degenerate problem may round to nothing in the
// naive computation, whose error then says nothing; this does. Called by the checker.
#pragma once

#include "reference/reference.h"

namespace tessera::reference {

/// What a kernel rounds besides what every kernel does.
struct Rounding {
  Dtype weights = Dtype::f32;     ///< of weights, where v is of 16 bits beside q and k of 8
  /// Products of i8 become scores by one subtraction of 1.5 * 2^23 in fp32 (tile/softmax_i8.h).
  bool offset_products = false;
};

/// For every element of every output of the pass, lse included, the size of error that is still
/// rounding: in all of a sweep's 10^8 elements, none of a right kernel should reach it (noise.cpp
/// derives it). `exact` is what attend() gave. Not counted: results too small to be normal.
Outputs noise(const Inputs& inputs, const Outputs& exact, const Rounding& kernel = {});

}  // namespace tessera::reference
