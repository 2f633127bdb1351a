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
  const char* call;    ///< the device function
  const char* params;  ///< its parameter's type
};

/// A program of its own with whatever kernels.
struct OtherProgram {
  const char* symbol;  ///< in the table of cubins
  const char* text;
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
  std::span<const OtherProgram> others;
};

/// All of them; compiler/main.cpp makes their programs.
std::span<const Architecture* const> architectures();

/// A row as an expression of CUDA C++, so that a program depends on nothing but its row.
std::string value_text(const core::Kernel& row);

}  // namespace tessera::cuda
