// The naive computation: three steps over the full score matrix in the problem's own dtype, as a
// plain framework does it (fp32 arithmetic, the result of every step rounded to storage). Its error
// against the reference is what the checker allows a kernel a small multiple of.
#pragma once

#include "reference/reference.h"

namespace tessera::reference {

/// o (and lse, which nothing rounds); for a backward, the gradients from the o in the inputs.
Outputs naive(const Inputs& inputs);

}  // namespace tessera::reference
