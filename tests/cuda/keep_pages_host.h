// aux/keep_pages.h for the host. As a system header: its pragmas are the device compiler's.
#pragma once
#pragma GCC system_header

#include "cuda/host_threads.h"
// After what stands for the device.
#include "cuda/aux/keep_pages.h"
