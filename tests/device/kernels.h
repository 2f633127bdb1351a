// The forward kernels of the catalog on fibers (fibers.h): the very code that the device compiler
// gets.
#pragma once

#include <span>
#include <string>

#include "core/kernel.h"

namespace tessera::device {

/// The rows that are compiled for it; those that decode without qv.
/// @{
std::span<const core::Kernel> rows();
std::span<const core::Kernel> decode_rows();
/// @}

/// Runs a launch of one of them, or of a kernel that comes before them: its symbol, and what it is
/// given. Returns what went wrong.
std::string launch(const std::string& symbol, unsigned blocks, const void* params);
/// The same of those that decode; false: it is none of them.
bool launch_decode(const std::string& symbol, unsigned blocks, const void* params,
                   std::string& wrong);

/// The same launch by the kernel of mma.sync for head dims and type of the row, which has 128 query
/// rows a tile.
std::string launch_mma(const core::Kernel& row, unsigned blocks, const void* params);

}  // namespace tessera::device
