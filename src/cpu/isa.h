// What each instruction set's translation unit (kernels.cpp, compiled once per set) offers to code
// that is compiled for every machine.
#pragma once

#include <cstddef>

#include "core/kernel.h"
#include "cpu/call.h"

namespace tessera::cpu {

struct Isa {
  /// The kernel of a catalog row, or null if this instruction set has none for it.
  KernelFunction (*find_kernel)(const core::Kernel& row);
  /// Merges partial results.
  void (*combine)(const CombineCall& call);
  void (*append)(const AppendCall& call);
  void (*quantize)(const QuantizeCall& call);
  /// Yardsticks (peak.h). A burst runs `rounds` rounds of register arithmetic and returns the
  /// floating point operations done, 0 if there is no such instruction; the sweep reads memory as
  /// fast as it can.
  double (*f32_burst)(std::int64_t rounds);
  double (*bf16_burst)(std::int64_t rounds);
  void (*read_sweep)(const std::byte* data, std::int64_t bytes);
};

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
