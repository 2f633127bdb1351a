// Facts about this machine: instruction sets, caches, the threads this process may use. Behind the
// public best_arch() and this_cpu(), which are defined here too because plan/ never looks at a CPU.
#pragma once

#include "tessera/device.hpp"

namespace tessera::cpu {

/// The largest instruction set that the processor has and the operating system saves the registers
/// of.
Arch machine_arch();

/// Hardware threads in this process's affinity mask, at least 1.
int usable_threads();

}  // namespace tessera::cpu
