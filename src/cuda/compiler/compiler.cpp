#include "cuda/compiler/compiler.h"

#include <string_view>

#include "cuda/symbol.h"
#include "plan/catalog.h"

namespace tessera::cuda {

/// The log says in words what complaint() looks for only because these ask for it.
std::vector<std::string> options_of(const Architecture& architecture, const std::string& root) {
  std::vector<std::string> options = {
      architecture.compiler_option,
      "-std=c++20",
      "-default-device",
      "--use_fast_math",
      "--ptxas-options=-v",
      "--ptxas-options=--warn-on-spills",
      "--ptxas-options=--warn-on-local-memory-usage",
  };
  if (!root.empty()) {
    for (const char* folder : {"/src", "/include", "/src/cuda/compiler/include"}) {
      options.push_back("-I" + root + folder);
    }
  }
  return options;
}

namespace {

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace

std::string complaint(const Compilation& result) {
  if (!result.ok) return "does not compile";
  std::string_view rest = result.log;
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(line.size() < rest.size() ? line.size() + 1 : line.size());
    if (contains(line, "C75")) return "has a C75xx remark of ptxas";
    for (const char* bad : {"spilled", "Local memory used"}) {
      if (contains(line, bad)) return std::string("ptxas says: ") + bad;
    }
    // One for each function of the program.
    if (contains(line, "bytes stack frame") &&
        !contains(line, "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")) {
      return "ptxas says: " + std::string(line);
    }
  }
  return {};
}

Program program_of(const Architecture& architecture, const core::Kernel& row) {
  std::string symbol = symbol_of(row);
  std::string text = architecture.row_program(row, symbol);
  return {&architecture, std::move(symbol), std::move(text), &row};
}
Program auxiliary_program_of(const Architecture& architecture) {
  return {&architecture, architecture.auxiliary_symbol, architecture.auxiliary_program()};
}
Program yardstick_program_of(const Architecture& architecture) {
  return {&architecture, architecture.yardstick.symbol, architecture.yardstick.text};
}

std::vector<Program> programs() {
  std::vector<Program> list;
  for (const Architecture* const one : architectures()) {
    for (const core::Kernel& row : kCatalog) {
      if (row.arch != one->arch) continue;
      list.push_back(program_of(*one, row));
    }
    list.push_back(auxiliary_program_of(*one));
    list.push_back(yardstick_program_of(*one));
  }
  return list;
}

MachineCode compile(const Nvrtc& nvrtc, const Program& program, const Headers& headers) {
  Compilation result = nvrtc.compile(program.symbol + ".cu", program.text, headers.texts,
                                     options_of(*program.architecture, headers.root));
  std::string problem = complaint(result);
  return {std::move(result.cubin), std::move(result.log), std::move(problem)};
}

}  // namespace tessera::cuda
