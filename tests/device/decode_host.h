// The decoding kernels for fibers, and what runs before them. As a system header: its pragmas are
// the device compiler's.
#pragma once
#pragma GCC system_header

#include "cuda_names.h"
// After what stands for the device.
#include "cuda/aux/find_prefixes.h"
#include "cuda/mma/decode.h"
