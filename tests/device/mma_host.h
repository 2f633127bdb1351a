// The forward kernel of mma.sync for fibers. As a system header: its pragmas are the device
// compiler's.
#pragma once
#pragma GCC system_header

#include "cuda_names.h"
// After what stands for the device.
#include "cuda/mma/forward.h"
