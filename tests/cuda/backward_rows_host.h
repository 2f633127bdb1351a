// aux/backward_rows.h and what makes dQ of sums for the host. As a system header: its pragmas are
// the device compiler's.
#pragma once
#pragma GCC system_header

#include "cuda/host_threads.h"
// After what stands for the device.
#include "cuda/aux/backward_rows.h"
#include "cuda/mma/backward_finish.h"
#include "cuda/sm90/piece.h"
