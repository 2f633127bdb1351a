// How far rounding alone may carry a right result from the exact one: an error analysis to first
// order, element by element, without luck. A tiny or degenerate problem may round to nothing in the
// naive computation, whose error then says nothing; this does. Called by the checker.
#pragma once

#include "reference/reference.h"

namespace tessera::reference {

/// For every element of every output of the pass, lse included, the size of error that is still
/// rounding: in all of a sweep's 10^8 elements, none of a right kernel should reach it (noise.cpp
/// derives it). `exact` is what attend() gave. weights: what they are rounded to where q and k have
/// 8 bits; elsewhere it is the problem's type. Not counted: results too small to be normal.
Outputs noise(const Inputs& inputs, const Outputs& exact, Dtype weights = Dtype::f32);

}  // namespace tessera::reference
