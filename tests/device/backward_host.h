// The backward kernels of mma.sync and of wgmma, and those around it for fibers. As a system
// header: its pragmas are the device compiler's.
#pragma once
#pragma GCC system_header

#include "cuda_names.h"
// After what stands for the device.
#include "cuda/mma/backward.h"
#include "cuda/mma/backward_finish.h"
#include "cuda/sm90/backward_wide.h"
#include "cuda/sm90/piece.h"
