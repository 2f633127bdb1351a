// One GPU architecture with kernels of its own, as the device compiler and the launches know it:
// which programs there are, and what a block of theirs needs.
#pragma once

#include <span>
#include <string>

#include "core/kernel.h"

namespace tessera::cuda {

/// A kernel that is not a row of the catalog: what a pass does before and after its main kernel.
struct Auxiliary {
  const char* name;    ///< of its function in the cubin
  const char* call;    ///< the device function, in tessera::cuda
  const char* params;  ///< its parameter's type
  int resident = 8;    ///< blocks of a multiprocessor that registers must suffice for
  /// It waits by itself for what was enqueued before it, and may be launched before that is done.
  bool begins_early = false;
};

/// What measure_peaks runs: a program with two kernels, launched with `threads` a block.
///   multiply_peak(int rounds, float* never): a multiprocessor's matrix products in bf16
///   read_peak(const uint4* memory, std::int64_t count, float* never): reads all of it
struct Yardstick {
  const char* symbol;  ///< in the table of cubins
  const char* text;
  int threads;
  int shared_bytes;         ///< of multiply_peak
  double round_operations;  ///< of a block of multiply_peak; a multiply-add is two
};

struct Architecture {
  Arch arch;
  const char* compiler_option;  ///< NVRTC's -arch
  /// Of a row of this arch: threads of a block, bytes of its shared memory.
  int (*threads)(const core::Kernel& row);
  int (*shared_bytes)(const core::Kernel& row);
  /// CUDA C++ of a row's kernel, a function of that name.
  std::string (*row_program)(const core::Kernel& row, const std::string& name);
  /// In one program, together.
  std::span<const Auxiliary> auxiliary;
  const char* auxiliary_symbol;
  int auxiliary_threads;
  std::string (*auxiliary_program)();
  Yardstick yardstick;
};

/// All of them; compiler/compiler.cpp lists their programs.
std::span<const Architecture* const> architectures();

/// A row as an expression of CUDA C++, so that a program depends on nothing but its row.
std::string value_text(const core::Kernel& row);

}  // namespace tessera::cuda
