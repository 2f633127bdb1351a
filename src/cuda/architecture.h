// One GPU architecture with kernels of its own, as the device compiler and the launches know it:
// which programs there are, what they are compiled for, and what a block of theirs needs.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "cuda/auxiliary.h"

namespace tessera::cuda {

/// What machine code is made for, and what runs it.
struct Image {
  const char* target;  ///< as NVRTC's -arch names it: "sm_80", or "compute_80", which is PTX
  bool (*runs_on)(int capability);  ///< of devices, 90 for 9.0
  /// Shared memory that these devices give a block, all of them alike: rows that take more are left
  /// out. 0: the rows are for devices of several kinds.
  int block_bytes = 0;

  /// The driver makes machine code of it.
  bool is_ptx() const;
  bool holds(int shared_bytes) const { return block_bytes == 0 || shared_bytes <= block_bytes; }
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
  std::span<const Image> images;  ///< that a build may have, those that fit best first
  /// What is compiled for a device where there is no image: for exactly that one.
  std::string (*target_on)(int capability);
  /// Grids may begin before those that they depend on have ended (ptx/grid.h).
  bool begins_early;
  /// Of a row of this arch: threads of a block, bytes of its shared memory.
  int (*threads)(const core::Kernel& row);
  int (*shared_bytes)(const core::Kernel& row);
  /// CUDA C++ of a row's kernel, a function of that name.
  std::string (*row_program)(const core::Kernel& row, const std::string& name);
  /// In one program, together; kAuxiliary first.
  std::span<const Auxiliary> auxiliary;
  const char* auxiliary_symbol;
  const char* auxiliary_includes;  ///< lines of CUDA C++: of what is not in kAuxiliary
  Yardstick yardstick;
};

/// All of them; compiler/compiler.cpp lists their programs.
std::span<const Architecture* const> architectures();

/// Every image's target, each once.
std::vector<std::string> all_targets();

/// A row as an expression of CUDA C++, so that a program depends on nothing but its row.
std::string value_text(const core::Kernel& row);

}  // namespace tessera::cuda
