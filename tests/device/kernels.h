// The forward kernels of the catalog on fibers (fibers.h): the very code that the device compiler
// gets.
#pragma once

#include <span>
#include <string>

#include "core/kernel.h"

namespace tessera::device {

/// The rows that are compiled for it.
std::span<const core::Kernel> rows();

/// Runs a launch of one of them, or of the kernel that lays out their values: its symbol, and what
/// it is given. Returns what went wrong.
std::string launch(const std::string& symbol, unsigned blocks, const void* params);

}  // namespace tessera::device
