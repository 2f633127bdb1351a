// From an architecture's program to machine code that is fit to run: NVRTC's options and the
// judgement of its log. Linked into the build's device compiler (main.cpp) and into the library.
#pragma once

#include <string>
#include <vector>

#include "core/kernel.h"
#include "cuda/architecture.h"
#include "cuda/compiler/nvrtc.h"

namespace tessera::cuda {

/// CUDA C++ that becomes one cubin for every target.
struct Program {
  const Architecture* architecture = nullptr;
  std::string symbol;  ///< in the table of cubins
  std::string text;
  const core::Kernel* row = nullptr;  ///< null: not a row of the catalog
};

/// Of a row, of what an architecture has beside its rows, and of its yardstick.
/// @{
Program program_of(const Architecture& architecture, const core::Kernel& row);
Program auxiliary_program_of(const Architecture& architecture);
Program yardstick_program_of(const Architecture& architecture);
/// @}

/// All that a build may embed: every catalog row of a GPU, and what its architecture has besides.
std::vector<Program> programs();

/// What a program may include: this project's files, or texts by the names they are included by.
struct Headers {
  std::string root;  ///< folder of a checkout, in which src/ lies; empty: no files
  std::vector<HeaderText> texts;
};

struct MachineCode {
  std::string cubin;      ///< empty if it does not compile; of a target that is PTX, that
  std::string log;        ///< NVRTC's and ptxas's
  std::string complaint;  ///< why it is not good enough; empty: it is
};

/// NVRTC's options for a target ("sm_90a"); root: of Headers.
std::vector<std::string> options_of(const std::string& target, const std::string& root);

/// Thread-safe. Precondition: nvrtc.missing() is empty.
MachineCode compile(const Nvrtc& nvrtc, const Program& program, const std::string& target,
                    const Headers& headers);

/// PTX as old drivers take it. NVRTC writes the newest version that it knows, and drivers refuse
/// what is newer than they are; what kernels have needs no such version.
std::string portable_ptx(const std::string& ptx);

/// Why a compilation is not good enough; empty: it is. Besides errors that is anything that would
/// make a kernel silently slow: spilled registers, local memory, a stack frame, or one of ptxas's
/// C75xx remarks (serialised wgmma, a fence it had to add, an ignored setmaxnreg).
std::string complaint(const Compilation& result);

}  // namespace tessera::cuda
