// What each instruction set's translation unit (kernels.cpp, compiled once per set) offers to code
// that is compiled for every machine.
#pragma once

#include <cstddef>

#include "core/kernel.h"
#include "cpu/call.h"

namespace tessera::cpu {

struct Isa {
  /// The kernel of a catalog row, or null if this instruction set has none for it.
  KernelFunction (*find_kernel)(const core::Kernel& row) = nullptr;
  /// Yardsticks (peak.h). A burst runs `rounds` rounds of register arithmetic and returns the
  /// floating point operations done, 0 if there is no such instruction; the sweep reads memory as
  /// fast as it can.
  double (*f32_burst)(std::int64_t rounds) = nullptr;
  double (*bf16_burst)(std::int64_t rounds) = nullptr;
  void (*read_sweep)(const std::byte* data, std::int64_t bytes) = nullptr;
  /// Functions of rows: these merge partial results, and so on. Null where row_set_of names another
  /// set, which has them.
  void (*combine)(const CombineCall& call) = nullptr;
  void (*append)(const AppendCall& call) = nullptr;
  void (*quantize)(const QuantizeCall& call) = nullptr;
};

/// The set that has an instruction set's functions of rows. Vectors of 16 lanes would be no faster,
/// as memory and tables bind them (docs/experiments.md), and as much code again.
constexpr Arch row_set_of(Arch arch) {
  return arch == Arch::avx512 || arch == Arch::avx512_bf16 ? Arch::avx2 : arch;
}

namespace portable {
extern const Isa kIsa;
}
namespace avx2 {
extern const Isa kIsa;
}
namespace avx512 {
extern const Isa kIsa;
}
namespace avx512_bf16 {
extern const Isa kIsa;
}

/// The set's table, or null if this build does not have it.
const Isa* isa_of(Arch arch);

}  // namespace tessera::cpu
