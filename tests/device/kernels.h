// Kernels of the catalog on fibers (fibers.h): the very code that the device compiler
// gets.
#pragma once

#include <span>
#include <string>

#include "core/kernel.h"

namespace tessera::device {

/// The rows that are compiled for it; those that decode without qv; those of mma.sync that do not,
/// of either pass.
/// @{
std::span<const core::Kernel> rows();
std::span<const core::Kernel> decode_rows();
std::span<const core::Kernel> mma_rows();
std::span<const core::Kernel> backward_rows();
/// @}

/// Runs a launch of one of them, or of a kernel that comes before or after it: its symbol, and what
/// it is given. Returns what went wrong.
std::string launch(const core::Kernel& row, const std::string& symbol, unsigned blocks,
                   const void* params);
/// The same of those that decode, and of those of mma.sync; false: it is none of them. With those
/// of the backward come the kernels around it.
/// @{
bool launch_mma(const std::string& symbol, unsigned blocks, const void* params, std::string& wrong);
bool launch_backward(const core::Kernel& row, const std::string& symbol, unsigned blocks,
                     const void* params, std::string& wrong);
bool launch_decode(const std::string& symbol, unsigned blocks, const void* params,
                   std::string& wrong);
/// @}

}  // namespace tessera::device
