// Hopper's forward and latent kernels for fibers, and what runs before them. As a system header:
// its pragmas are the device compiler's.
#pragma once
#pragma GCC system_header

#include "cuda_names.h"
// After what stands for the device.
#include "cuda/aux/keep_pages.h"
#include "cuda/aux/lay_values.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/latent.h"
