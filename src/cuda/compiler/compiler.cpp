#include "cuda/compiler/compiler.h"

#include <algorithm>
#include <string_view>

#include "cuda/symbol.h"
#include "plan/catalog.h"

namespace tessera::cuda {

/// The log says in words what complaint() looks for only because these ask for it.
std::vector<std::string> options_of(const std::string& target, const std::string& root) {
  std::vector<std::string> options = {
      "-arch=" + target,
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
  return {&architecture, architecture.auxiliary_symbol,
          auxiliary_program(architecture.auxiliary, architecture.auxiliary_includes)};
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

MachineCode compile(const Nvrtc& nvrtc, const Program& program, const std::string& target,
                    const Headers& headers) {
  Compilation result = nvrtc.compile(program.symbol + ".cu", program.text, headers.texts,
                                     options_of(target, headers.root));
  std::string problem = complaint(result);
  const bool machine = result.ok && !result.cubin.empty();
  return {machine ? std::move(result.cubin) : portable_ptx(result.ptx), std::move(result.log),
          std::move(problem)};
}

std::string portable_ptx(const std::string& ptx) {
  std::string text;
  std::string_view rest = ptx;
  // Words of 128 bits came with 8.3, all others before.
  const std::string version = contains(ptx, ".b128") ? ".version 8.3" : ".version 7.8";
  while (!rest.empty()) {
    const std::size_t length = std::min(rest.find('\n'), rest.size() - 1) + 1;
    const std::string_view line = rest.substr(0, length);
    rest.remove_prefix(length);
    if (line.starts_with(".version ")) {
      text += version + "\n";
    } else if (!contains(line, ".pragma \"used_bytes_mask")) {
      text += line;
    }
  }
  return text;
}

}  // namespace tessera::cuda
